// The choice of experts: logits, softmax over all experts, the most probable ones in ascending id, renormalised.
#pragma once

#include "matrix.h"

namespace ttd {

struct Router {
  Matrix gate;  // [experts, hidden]
  int64_t tokens, choices;
  Type x_type;
  const void* x;   // [tokens, hidden]
  int32_t* ids;    // [tokens, choices]
  float* weights;  // [tokens, choices]
};

void router(const Router& call);

}  // namespace ttd

#ifdef TTD_OPERATIONS
#include "linear.h"

namespace ttd::TTD_ISA {

// Turns logits [experts] into probabilities. A NaN or an infinity among them makes all NaN.
static inline void softmax(float* x, int64_t experts) {
  const int64_t whole = experts / 16 * 16;
  const int rest = static_cast<int>(experts - whole);
  float top = x[0];
  for (int64_t e = 1; e < experts; ++e) top = x[e] > top ? x[e] : top;
  Floats total = splat(0.0f);
  for (int64_t e = 0; e < whole; e += 16) {
    const Floats value = exp(load(x + e) - splat(top));
    store(x + e, value);
    total = total + value;
  }
  if (rest > 0) {
    store_some(x + whole, exp(load_some(x + whole, rest) - splat(top)), rest);
    total = total + load_some(x + whole, rest);
  }
  const Floats divisor = splat(sum(total));
  for (int64_t e = 0; e < whole; e += 16) store(x + e, load(x + e) / divisor);
  if (rest > 0) store_some(x + whole, load_some(x + whole, rest) / divisor, rest);
}

// The `choices` largest of p, equal ones by lowest id, in ascending id. NaN counts as the smallest.
static inline void choose(const float* p, int64_t experts, int64_t choices, int32_t* ids) {
  const auto rank = [&](int64_t e) { return p[e] == p[e] ? p[e] : -1.0f; };
  int64_t count = 0;
  for (int64_t e = 0; e < experts; ++e) {
    const float value = rank(e);
    if (count == choices && !(value > rank(ids[count - 1]))) continue;
    int64_t at = count < choices ? count++ : count - 1;
    for (; at > 0 && value > rank(ids[at - 1]); --at) ids[at] = ids[at - 1];
    ids[at] = static_cast<int32_t>(e);
  }
  for (int64_t i = 1; i < choices; ++i)
    for (int64_t j = i; j > 0 && ids[j] < ids[j - 1]; --j) {
      const int32_t lower = ids[j];
      ids[j] = ids[j - 1];
      ids[j - 1] = lower;
    }
}

static void router(const Router& call) {
  const FloatMode mode(Denormals::kept);
  const int64_t experts = call.gate.rows;
  float* logits = scratch<float>(Scratch::hidden, call.tokens * experts);
  const Linear gate{call.gate, 0, experts, call.tokens, call.x_type, call.x, Type::f32, logits};
  TTD_ISA::linear_all(&gate, 1);
  constexpr int64_t together = 16;
  parallel_for((call.tokens + together - 1) / together, [&](int64_t chunk) {
    for (int64_t t = chunk * together; t < call.tokens && t < (chunk + 1) * together; ++t) {
      float* p = logits + t * experts;
      int32_t* ids = call.ids + t * call.choices;
      softmax(p, experts);
      choose(p, experts, call.choices, ids);
      float total = p[ids[0]];
      for (int64_t j = 1; j < call.choices; ++j) total += p[ids[j]];
      for (int64_t j = 0; j < call.choices; ++j) call.weights[t * call.choices + j] = p[ids[j]] / total;
    }
  });
}

}  // namespace ttd::TTD_ISA
#endif
