// The sizes in which products are made, and loops over them with constant bounds.
#pragma once

#include <type_traits>
#include <utility>

#include "simd.h"

namespace ttd::TTD_ISA {

constexpr int block_rows = 32;    // rows of a matrix that are multiplied by one call
constexpr int block_tokens = 96;  // rows of activations that are

// Calls f with the constant n, which lies in [1, most].
template <int most, class F>
static inline void with_constant(int n, F&& f) {
  if constexpr (most > 0) {
    if (n == most)
      f(std::integral_constant<int, most>());
    else
      with_constant<most - 1>(n, f);
  }
}

// Calls f(first, n) over [0, count) in steps of n = `step`, then of 1; n is a constant.
template <int step, class F>
static inline void over_tiles(int count, F&& f) {
  int first = 0;
  for (; first + step <= count; first += step) f(first, std::integral_constant<int, step>());
  if constexpr (step > 1)
    for (; first < count; ++first) f(first, std::integral_constant<int, 1>());
}

// The sums of n vectors to out[0, n).
template <int n>
static inline void sum_each(const Floats* lanes, float* out) {
  int i = 0;
  for (; i + 4 <= n; i += 4) sums(lanes[i], lanes[i + 1], lanes[i + 2], lanes[i + 3], out + i);
  for (; i < n; ++i) out[i] = sum(lanes[i]);
}

}  // namespace ttd::TTD_ISA
