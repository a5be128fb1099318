// The weighted sum of experts' outputs: products and sums rounded apart, in order, as expert_ffn adds them.
#pragma once

#include <cstdint>

namespace ttd {

struct Combine {
  int64_t tokens, choices, width;
  const float* contributions;  // [tokens, choices, width]
  const float* weights;        // [tokens, choices]
  float* out;                  // [tokens, width]
};

void combine(const Combine& call);

}  // namespace ttd
