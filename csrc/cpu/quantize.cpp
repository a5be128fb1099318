#include "quantize.h"

#include "operations.h"

namespace ttd {

void quantize(const Quantize& call) { operations().quantize(call); }

}  // namespace ttd
