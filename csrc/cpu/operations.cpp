// Compiled once for each instruction set.
#include "operations.h"

#define TTD_OPERATIONS
#include "simd.h"

#include "expert_ffn.h"
#include "linear.h"

#define TTD_CONCAT(a, b) a##b
#define TTD_TABLE(isa) TTD_CONCAT(isa, _operations)

namespace ttd {

extern const Operations TTD_TABLE(TTD_ISA) = {
    .expert_ffn = TTD_ISA::expert_ffn,
    .linear = TTD_ISA::linear,
};

}  // namespace ttd
