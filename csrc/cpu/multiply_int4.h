// Rows of activations times rows of 4-bit codes. Codes meet activations as integers: w . x is, over groups, the sum of
// scale * (codes . x) + bias * (sum of x), in the unit of x. A float sees at most one rounding a lane and group.
#pragma once

#include "laid_out.h"
#include "tiles.h"

namespace ttd::TTD_ISA {

static inline Floats load_scales(const Matrix& m, const void* from, int64_t index, int count) {
  Floats out = splat(0.0f);
  with_type(m.type, [&](auto* type) {
    const auto* p = static_cast<decltype(type)>(const_cast<void*>(from)) + index;
    out = count >= 16 ? load(p) : load_some(p, count);
  });
  return out;
}

// R rows of m from `first` times T rows of activations, to out[t * block_rows + r].
template <int group, int R, int T>
static inline void multiply_codes(const Matrix& m, int64_t first, const FixedRow* x, float* out) {
  constexpr int blocks = 16 * group / 128;  // in which sixteen groups lie
  const auto* codes = static_cast<const uint8_t*>(m.codes) + first * m.row_bytes();
  Floats lanes[T][R];
  for (int t = 0; t < T; ++t)
    for (int r = 0; r < R; ++r) lanes[t][r] = splat(0.0f);

  for (int64_t g = 0; g < m.groups(); g += 16) {
    const int some = m.groups() - g < 16 ? static_cast<int>(m.groups() - g) : 16;
    Scales scales[R];
    for (int r = 0; r < R; ++r) {
      const int64_t at = (first + r) * m.groups() + g;
      scales[r] = keep(load_scales(m, m.scales, at, some));
      const Floats bias = load_scales(m, m.biases, at, some);
      for (int t = 0; t < T; ++t) lanes[t][r] = fma(bias, load(x[t].sums + g), lanes[t][r]);
    }
    const int64_t first_block = g * group / 128;
    for (int b = 0; b < blocks && 128 * b < some * group; ++b) {
      const int bytes = some * group - 128 * b < 128 ? (some * group - 128 * b) / 2 : 64;
      Nibbles at[R];
      Floats scale[R];
      for (int r = 0; r < R; ++r) {
        const uint8_t* from = codes + r * m.row_bytes() + (first_block + b) * 64;
        at[r] = bytes == 64 ? nibbles(from) : some_nibbles(from, bytes);
        scale[r] = spread<group>(scales[r], b);
      }
      for (int t = 0; t < T; ++t)
        for (int r = 0; r < R; ++r) lanes[t][r] = fma(dot(at[r], x[t].blocks[first_block + b]), scale[r], lanes[t][r]);
    }
  }
  for (int t = 0; t < T; ++t) {
    sum_rows<R>(lanes[t], out + t * block_rows);
    for (int r = 0; r < R; ++r) out[t * block_rows + r] *= x[t].unit;
  }
}

template <int group>
static inline void multiply_int4(const Matrix& m, int64_t first, int rows, const uint8_t* const* x, int tokens, float* out) {
  FixedRow fixed[block_tokens];
  for (int t = 0; t < tokens; ++t) fixed[t] = fixed_row(m, x[t]);
  if (tokens == 1) {
    over_tiles<int4_rows>(rows, [&](int row, auto R) { multiply_codes<group, R, 1>(m, first + row, fixed, out + row); });
    return;
  }
  for (int token = 0; token < tokens; token += int4_tokens) {
    const int some = tokens - token < int4_tokens ? tokens - token : int4_tokens;
    over_tiles<int4_rows_of_many>(rows, [&](int row, auto R) {
      with_constant<int4_tokens>(some, [&](auto T) {
        multiply_codes<group, R, T>(m, first + row, fixed + token, out + token * block_rows + row);
      });
    });
  }
}

}  // namespace ttd::TTD_ISA
