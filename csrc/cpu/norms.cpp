#include "norms.h"

#include "operations.h"

namespace ttd {

void rms_norm(const RmsNorm& call) { operations().rms_norm(call); }
void norm_rope(const NormRope& call) { operations().norm_rope(call); }

}  // namespace ttd
