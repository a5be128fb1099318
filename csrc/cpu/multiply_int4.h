// Rows of activations times rows of 4-bit codes. Codes meet activations as integers: w . x is, over groups, the sum of
// scale * (codes . x) + bias * (sum of x), in the unit of x. A float sees at most one rounding a lane and group.
#pragma once

#include "laid_out.h"
#include "tiles.h"

namespace ttd::TTD_ISA {

template <class S>
static inline Floats load_scales(const void* from, int64_t index, int count) {
  const S* p = static_cast<const S*>(from) + index;
  return count >= 16 ? load(p) : load_some(p, count);
}

// R rows of m from `first` times T rows of activations, to out[t * block_rows + r]. S is the type of scales.
template <int group, class S, int R, int T>
[[gnu::always_inline]] static inline void multiply_codes(const Matrix& m, int64_t first, const FixedRow* x, float* out) {
  constexpr int blocks = 16 * group / 128;  // in which sixteen groups lie
  const int64_t groups = m.cols / group, row_bytes = m.cols / 2;
  const auto* codes = static_cast<const uint8_t*>(m.codes) + first * row_bytes;
  const FixedBlock* block[T];
  const float* sums[T];
  Floats lanes[T][R];
  for (int t = 0; t < T; ++t) {
    block[t] = x[t].blocks;
    sums[t] = x[t].sums;
    for (int r = 0; r < R; ++r) lanes[t][r] = splat(0.0f);
  }

  for (int64_t g = 0; g < groups; g += 16) {
    const int some = groups - g < 16 ? static_cast<int>(groups - g) : 16;
    Scales scales[R];
    for (int r = 0; r < R; ++r) {
      const int64_t at = (first + r) * groups + g;
      scales[r] = keep(load_scales<S>(m.scales, at, some));
      const Floats bias = load_scales<S>(m.biases, at, some);
      for (int t = 0; t < T; ++t) lanes[t][r] = fma(bias, load(sums[t] + g), lanes[t][r]);
    }
    const int64_t start = g * group / 128;
    const int columns = some * group;
    const auto add_block = [&](int b, auto whole) __attribute__((always_inline)) {
      Nibbles at[R];
      Floats scale[R];
      for (int r = 0; r < R; ++r) {
        const uint8_t* from = codes + r * row_bytes + (start + b) * 64;
        read_ahead(from);
        at[r] = whole ? nibbles(from) : some_nibbles(from, (columns - 128 * b) / 2);
        scale[r] = spread<group>(scales[r], b);
      }
      for (int t = 0; t < T; ++t) {
        Floats products[R];
        dot<R>(at, block[t][start + b], products);
        for (int r = 0; r < R; ++r) lanes[t][r] = fma(products[r], scale[r], lanes[t][r]);
      }
    };
    int b = 0;
    for (; b < blocks && 128 * (b + 1) <= columns; ++b) add_block(b, std::true_type());
    if (b < blocks && 128 * b < columns) add_block(b, std::false_type());
  }
  float totals[T * R];
  sum_each<T * R>(&lanes[0][0], totals);
  for (int t = 0; t < T; ++t)
    for (int r = 0; r < R; ++r) out[t * block_rows + r] = totals[t * R + r] * x[t].unit;
}

template <int group, class S>
static inline void multiply_int4(const Matrix& m, int64_t first, int rows, const uint8_t* const* x, int tokens, float* out) {
  FixedRow fixed[block_tokens];
  for (int t = 0; t < tokens; ++t) fixed[t] = fixed_row(m, x[t]);
  if (tokens == 1) {
    over_tiles<int4_rows>(rows, [&](int row, auto R) { multiply_codes<group, S, R, 1>(m, first + row, fixed, out + row); });
    return;
  }
  for (int token = 0; token < tokens; token += int4_tokens) {
    const int some = tokens - token < int4_tokens ? tokens - token : int4_tokens;
    with_constant<int4_tokens>(some, [&](auto T) {
      over_tiles<int4_rows_of_many>(rows, [&](int row, auto R) {
        multiply_codes<group, S, R, T>(m, first + row, fixed + token, out + token * block_rows + row);
      });
    });
  }
}

}  // namespace ttd::TTD_ISA
