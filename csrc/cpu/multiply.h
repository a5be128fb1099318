// Rows of activations times a block of rows of a stored matrix. Every output is one sum of sixteen lanes along the
// columns in one fixed order, whatever the number of rows: a row's result has the same bits alone and among many.
#pragma once

#include <utility>

#include "packed.h"
#include "pool.h"

namespace ttd::TTD_ISA {

constexpr int block_rows = 32;     // rows of a matrix that are multiplied by one call
constexpr int block_tokens = 96;   // rows of activations whose partial sums are held at once
constexpr int block_steps = 64;    // steps of sixteen columns that are unpacked at once

// x [m.cols] in the order that `multiply` reads, zeros up to a whole step: out [16 * m.steps()].
template <class T>
static inline void lay_out(const Matrix& m, const T* x, float* out) {
  if (m.format != Format::int4) {
    int64_t i = 0;
    for (; i + 16 <= m.cols; i += 16) store(out + i, load(x + i));
    if (i < m.cols) store(out + i, load_some(x + i, static_cast<int>(m.cols - i)));
    return;
  }
  const int words = m.group / 8, steps = m.group / 16;
  for (int64_t g = 0; g < m.cols; g += m.group) {
    float natural[128];
    for (int i = 0; i < m.group; i += 16) store(natural + i, load(x + g + i));
    for (int nibble = 0; nibble < 8; ++nibble)
      for (int word = 0; word < words; ++word)
        out[g + nibble % steps * 16 + nibble / steps * words + word] = natural[8 * word + nibble];
  }
}

static inline void widen_run(const Matrix& m, const void* from, int64_t start, int64_t count, float* to) {
  with_type(m.type, [&](auto* type) {
    const auto* p = static_cast<decltype(type)>(const_cast<void*>(from)) + start;
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) store(to + i, load(p + i));
    if (i < count) store(to + i, load_some(p + i, static_cast<int>(count - i)));
  });
}

// The scales and biases of some rows as floats: value of row r and group g at [r * groups + g].
struct Scales {
  const float* scales = nullptr;
  const float* biases = nullptr;
  int64_t groups = 0;

  Scales(const Matrix& m, int64_t first, int rows) {
    if (m.format == Format::plain) return;
    groups = m.groups();
    const int64_t count = (rows * groups + 15) / 16 * 16;
    float* widened = scratch<float>(Scratch::scales, 2 * count);
    widen_run(m, m.scales, first * groups, rows * groups, widened);
    widen_run(m, m.biases, first * groups, rows * groups, widened + count);
    scales = widened;
    biases = widened + count;
  }
  inline float scale(int row, int64_t g) const { return scales ? scales[row * groups + g] : 0.0f; }
  inline float bias(int row, int64_t g) const { return biases ? biases[row * groups + g] : 0.0f; }
};

template <int R>
static inline void sum_rows(const Floats* lanes, float* out) {
  if constexpr (R == 4) {
    sums(lanes[0], lanes[1], lanes[2], lanes[3], out);
  } else {
    for (int r = 0; r < R; ++r) out[r] = sum(lanes[r]);
  }
}

// Weights straight from their codes into R x T sums.
template <class Codes, int R, int T>
static inline void multiply_codes(const uint8_t* const* rows, const Scales& scales, int row, int64_t groups,
                                  const float* const* x, float* out) {
  Floats lanes[T][R];
  for (int t = 0; t < T; ++t)
    for (int r = 0; r < R; ++r) lanes[t][r] = splat(0.0f);
  for (int64_t g = 0; g < groups; ++g) {
    typename Codes::Group group[R];
    for (int r = 0; r < R; ++r) group[r] = Codes::group(rows[r], g, scales.scale(row + r, g), scales.bias(row + r, g));
    [&]<int... step>(std::integer_sequence<int, step...>) {
      (
          [&] {
            Floats weight[R];
            for (int r = 0; r < R; ++r) weight[r] = Codes::template weight<step>(group[r]);
            for (int t = 0; t < T; ++t) {
              const Floats value = load(x[t] + (g * Codes::steps + step) * 16);
              for (int r = 0; r < R; ++r) lanes[t][r] = fma(weight[r], value, lanes[t][r]);
            }
          }(),
          ...);
    }(std::make_integer_sequence<int, Codes::steps>());
  }
  for (int t = 0; t < T; ++t) sum_rows<R>(lanes[t], out + t * block_rows);
}

template <class Codes>
static inline void unpack(const uint8_t* row, const Scales& scales, int index, int64_t first_group, int64_t groups, float* out) {
  for (int64_t g = first_group; g < first_group + groups; ++g) {
    const auto group = Codes::group(row, g, scales.scale(index, g), scales.bias(index, g));
    [&]<int... step>(std::integer_sequence<int, step...>) {
      (store(out + step * 16, Codes::template weight<step>(group)), ...);
    }(std::make_integer_sequence<int, Codes::steps>());
    out += 16 * Codes::steps;
  }
}

// R x T sums of sixteen lanes over `steps` steps, continued from `lanes`.
template <int R, int T>
static inline void multiply_tile(const float* weights, int64_t stride, const float* const* x, int64_t from, int64_t steps,
                                 bool fresh, Floats* lanes) {
  Floats sums[T][R];
  for (int t = 0; t < T; ++t)
    for (int r = 0; r < R; ++r) sums[t][r] = fresh ? splat(0.0f) : lanes[t * R + r];
  for (int64_t i = 0; i < steps * 16; i += 16) {
    Floats weight[R];
    for (int r = 0; r < R; ++r) weight[r] = load(weights + r * stride + i);
    for (int t = 0; t < T; ++t) {
      const Floats value = load(x[t] + from + i);
      for (int r = 0; r < R; ++r) sums[t][r] = fma(weight[r], value, sums[t][r]);
    }
  }
  for (int t = 0; t < T; ++t)
    for (int r = 0; r < R; ++r) lanes[t * R + r] = sums[t][r];
}

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

// Calls f(row, R) over tiles that cover `rows`.
template <class F>
static inline void over_tiles(int rows, F&& f) {
  int row = 0;
  for (; row + tile_rows <= rows; row += tile_rows) f(row, std::integral_constant<int, tile_rows>());
  for (; row < rows; ++row) f(row, std::integral_constant<int, 1>());
}

template <class Codes>
static inline void multiply_direct(const Matrix& m, int64_t first, int rows, const float* const* x, int tokens, float* out) {
  const Scales scales(m, first, rows);
  const auto* codes = static_cast<const uint8_t*>(m.codes) + first * m.row_bytes();
  over_tiles(rows, [&](int row, auto R) {
    const uint8_t* at[R];
    for (int r = 0; r < R; ++r) at[r] = codes + (row + r) * m.row_bytes();
    with_constant<direct_tokens>(tokens, [&](auto T) {
      multiply_codes<Codes, R, T>(at, scales, row, m.steps() / Codes::steps, x, out + row);
    });
  });
}

template <class Codes>
static inline void multiply_panel(const Matrix& m, int64_t first, int rows, const float* const* x, int tokens, float* out) {
  const Scales scales(m, first, rows);
  const auto* codes = static_cast<const uint8_t*>(m.codes) + first * m.row_bytes();
  const int64_t whole = m.cols / 16, steps = m.steps();
  float* panel = scratch<float>(Scratch::panel, block_rows * block_steps * 16);
  Floats* partial = scratch<Floats>(Scratch::sums, block_rows * block_tokens);
  for (int64_t from = 0; from < steps; from += block_steps) {
    const int64_t count = steps - from < block_steps ? steps - from : block_steps;
    const int64_t full = (whole - from < count ? whole - from : count) / Codes::steps;
    for (int r = 0; r < rows; ++r) {
      const uint8_t* row = codes + r * m.row_bytes();
      float* to = panel + r * block_steps * 16;
      unpack<Codes>(row, scales, r, from / Codes::steps, full, to);
      if constexpr (Codes::plain) {
        if (full < count)
          store(to + full * 16, load_some(Codes::group(row, whole, 0, 0), static_cast<int>(m.cols - whole * 16)));
      }
    }
    for (int token = 0; token < tokens; token += tile_tokens) {
      const int some = tokens - token < tile_tokens ? tokens - token : tile_tokens;
      over_tiles(rows, [&](int row, auto R) {
        Floats* lanes = partial + token * block_rows + row * some;
        with_constant<tile_tokens>(some, [&](auto T) {
          multiply_tile<R, T>(panel + row * block_steps * 16, block_steps * 16, x + token, from * 16, count, from == 0, lanes);
          if (from + count == steps)
            for (int t = 0; t < T; ++t) sum_rows<R>(lanes + t * R, out + (token + t) * block_rows + row);
        });
      });
    }
  }
}

template <class F>
static inline void with_codes(const Matrix& m, F&& f) {
  if (m.format == Format::plain) {
    with_type(m.type, [&](auto* type) { f(Plain<std::remove_pointer_t<decltype(type)>>()); });
  } else if (m.format == Format::int8) {
    if (m.group == 32) f(Int8<32>());
    if (m.group == 64) f(Int8<64>());
    if (m.group == 128) f(Int8<128>());
  } else {
    if (m.group == 32) f(Int4<32>());
    if (m.group == 64) f(Int4<64>());
    if (m.group == 128) f(Int4<128>());
  }
}

// Rows [first, first + rows) of m, at most block_rows, times `tokens` rows of laid-out activations x[t], at most
// block_tokens: out [tokens][block_rows].
static inline void multiply(const Matrix& m, int64_t first, int rows, const float* const* x, int tokens, float* out) {
  with_codes(m, [&]<class Codes>(Codes) {
    if (tokens <= direct_tokens && m.cols % 16 == 0)
      multiply_direct<Codes>(m, first, rows, x, tokens, out);
    else
      multiply_panel<Codes>(m, first, rows, x, tokens, out);
  });
}

}  // namespace ttd::TTD_ISA
