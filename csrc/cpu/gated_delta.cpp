#include "gated_delta.h"

#include "operations.h"

namespace ttd {

void gated_delta(const GatedDelta& call) { operations().gated_delta(call); }

}  // namespace ttd
