// Products with a gate, and the sum that ends a mixture-of-experts layer.
#pragma once

#include "numbers.h"

namespace ttd {

// out = silu(gate) * up.
struct SwiGlu {
  int64_t count;
  const float *gate, *up;
  float* out;
};

void swiglu(const SwiGlu& call);

// out = sigmoid(scale) * x.
struct SigmoidScaled {
  int64_t tokens, width;
  const float* scale;  // [tokens]
  const float* x;      // [tokens, width]
  float* out;          // may be x
};

void sigmoid_scaled(const SigmoidScaled& call);

// out = residual + (routed + shared rounded to the type of both).
struct ExpertSum {
  int64_t count;
  Type type;
  const void* residual;
  const float *routed, *shared;
  void* out;
};

void expert_sum(const ExpertSum& call);

}  // namespace ttd

#ifdef TTD_OPERATIONS
#include "pool.h"
#include "sixteens.h"

namespace ttd::TTD_ISA {

// f(i, n) for every sixteenth i of `count` numbers, by all threads.
template <class F>
static inline void over_numbers(int64_t count, F&& f) {
  parallel_for((count + numbers_per_chunk - 1) / numbers_per_chunk, [&](int64_t chunk) {
    const int64_t start = chunk * numbers_per_chunk;
    over_sixteens(smaller(count - start, numbers_per_chunk), [&](int64_t i, int64_t n) { f(start + i, n); });
  });
}

static void swiglu(const SwiGlu& call) {
  const FloatMode mode(Denormals::kept);
  over_numbers(call.count, [&](int64_t i, int64_t n) {
    store_upto(call.out + i, silu(load_upto(call.gate + i, n)) * load_upto(call.up + i, n), n);
  });
}

static void sigmoid_scaled(const SigmoidScaled& call) {
  const FloatMode mode(Denormals::kept);
  constexpr int64_t together = 4;
  parallel_for((call.tokens + together - 1) / together, [&](int64_t chunk) {
    for (int64_t t = chunk * together; t < smaller(call.tokens, (chunk + 1) * together); ++t) {
      const Floats factor = sigmoid(splat(call.scale[t]));
      over_sixteens(call.width, [&](int64_t i, int64_t n) {
        const int64_t at = t * call.width + i;
        store_upto(call.out + at, factor * load_upto(call.x + at, n), n);
      });
    }
  });
}

static void expert_sum(const ExpertSum& call) {
  const FloatMode mode(Denormals::kept);
  with_type(call.type, [&](auto* kind) {
    using T = std::remove_pointer_t<decltype(kind)>;
    over_numbers(call.count, [&](int64_t i, int64_t n) {
      T rounded[16];
      store(rounded, load_upto(call.routed + i, n) + load_upto(call.shared + i, n));
      store_upto(static_cast<T*>(call.out) + i, load_upto(static_cast<const T*>(call.residual) + i, n) + load(rounded), n);
    });
  });
}

}  // namespace ttd::TTD_ISA
#endif
