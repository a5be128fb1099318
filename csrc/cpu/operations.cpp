// Compiled once for each instruction set.
#include "operations.h"

#define TTD_OPERATIONS
#include "simd.h"

#include "attention.h"
#include "expert_ffn.h"
#include "gated_delta.h"
#include "gates.h"
#include "linear.h"
#include "norms.h"
#include "quantize.h"
#include "router.h"
#include "top.h"

#define TTD_CONCAT(a, b) a##b
#define TTD_TABLE(isa) TTD_CONCAT(isa, _operations)

namespace ttd {

extern const Operations TTD_TABLE(TTD_ISA) = {
    .attention = TTD_ISA::attention,
    .expert_ffn = TTD_ISA::expert_ffn,
    .expert_sum = TTD_ISA::expert_sum,
    .gated_delta = TTD_ISA::gated_delta,
    .linear_all = TTD_ISA::linear_all,
    .norm_rope = TTD_ISA::norm_rope,
    .quantize = TTD_ISA::quantize,
    .rms_norm = TTD_ISA::rms_norm,
    .router = TTD_ISA::router,
    .sigmoid_scaled = TTD_ISA::sigmoid_scaled,
    .swiglu = TTD_ISA::swiglu,
    .top = TTD_ISA::top,
};

}  // namespace ttd
