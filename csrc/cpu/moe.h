// The feed-forward of a mixture-of-experts layer: the shared expert, and all of it in one call.
#pragma once

#include "expert_ffn.h"

namespace ttd {

// sigmoid(scale x) * down(silu(gate x) * up x).
struct SharedExpert {
  Matrix gate, up, down, scale;
  int64_t tokens;
  Type x_type;
  const void* x;  // [tokens, hidden]
  float* out;     // [tokens, hidden]
  bool prefill;
};

void shared_expert(const SharedExpert& call);

// residual plus the routed experts, which have weights, and then the shared one. Both get their `out` here.
struct Moe {
  ExpertFfn routed;
  SharedExpert shared;
  const void* residual;  // [tokens, hidden] in x's type
  void* out;             // the same
};

void moe(const Moe& call);

}  // namespace ttd
