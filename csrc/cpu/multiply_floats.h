// Rows of activations times rows of 8-bit codes or plain numbers, as floats.
#pragma once

#include "laid_out.h"
#include "packed.h"
#include "pool.h"
#include "tiles.h"

namespace ttd::TTD_ISA {

constexpr int block_steps = 64;  // steps of sixteen columns that are unpacked at once

// The scales and biases of some rows as floats.
struct WideScales {
  const float *scales = nullptr, *biases = nullptr;
  int64_t groups = 0;

  WideScales(const Matrix& m, int64_t first, int rows) {
    if (m.format == Format::plain) return;
    groups = m.groups();
    const int64_t count = (rows * groups + 15) / 16 * 16;
    float* wide = scratch<float>(Scratch::scales, 2 * count);
    widen(m, m.scales, first * groups, rows * groups, wide);
    widen(m, m.biases, first * groups, rows * groups, wide + count);
    scales = wide;
    biases = wide + count;
  }
  const float* scale(int row) const { return scales + row * groups; }
  const float* bias(int row) const { return biases + row * groups; }

 private:
  static void widen(const Matrix& m, const void* from, int64_t start, int64_t count, float* to) {
    with_type(m.type, [&](auto* type) {
      const auto* p = static_cast<decltype(type)>(const_cast<void*>(from)) + start;
      for (int64_t i = 0; i < count; i += 16)
        store(to + i, count - i < 16 ? load_some(p + i, static_cast<int>(count - i)) : load(p + i));
    });
  }
};

// Calls f with the constants 0 to n - 1.
template <int n, class F>
static inline void each_step(F&& f) {
  [&]<int... step>(std::integer_sequence<int, step...>) {
    (f(std::integral_constant<int, step>()), ...);
  }(std::make_integer_sequence<int, n>());
}

// R rows, straight from their codes, times one row of activations.
template <class Codes, int R>
static inline void multiply_row(const Matrix& m, const uint8_t* rows, const WideScales& wide, int row, const float* x, float* out) {
  Floats lanes[R];
  const uint8_t* at[R];
  const float *scale[R], *bias[R];
  for (int r = 0; r < R; ++r) {
    lanes[r] = splat(0.0f);
    at[r] = rows + r * m.row_bytes();
    scale[r] = wide.scale(row + r);
    bias[r] = wide.bias(row + r);
  }
  const int64_t groups = m.cols / (16 * Codes::steps);
  for (int64_t g = 0; g < groups; ++g, x += 16 * Codes::steps) {
    typename Codes::Group group[R];
    for (int r = 0; r < R; ++r) group[r] = Codes::group(at[r], g, scale[r], bias[r]);
    each_step<Codes::steps>([&](auto step) {
      const Floats value = load(x + 16 * step);
      for (int r = 0; r < R; ++r) lanes[r] = fma(Codes::template weight<step>(group[r]), value, lanes[r]);
    });
  }
  if (m.cols % 16 != 0) {
    if constexpr (!Codes::scaled)
      for (int r = 0; r < R; ++r)
        lanes[r] = fma(load_some(Codes::group(at[r], groups, nullptr, nullptr), static_cast<int>(m.cols % 16)), load(x), lanes[r]);
  }
  sum_each<R>(lanes, out);
}

// `steps` steps of R rows into out, the rows of a step side by side.
template <class Codes, int R>
static inline void unpack(const Matrix& m, const uint8_t* rows, const WideScales& wide, int row, int64_t from, int64_t steps, float* out) {
  for (int r = 0; r < R; ++r) {
    const uint8_t* at = rows + r * m.row_bytes();
    float* to = out + 16 * r;
    int64_t step = from;
    for (; step + Codes::steps <= from + steps && 16 * (step + Codes::steps) <= m.cols; step += Codes::steps) {
      const auto group = Codes::group(at, step / Codes::steps, wide.scale(row + r), wide.bias(row + r));
      each_step<Codes::steps>([&](auto i) {
        store(to, Codes::template weight<i>(group));
        to += 16 * R;
      });
    }
    if constexpr (!Codes::scaled)
      if (step < from + steps) store(to, load_some(Codes::group(at, step, nullptr, nullptr), static_cast<int>(m.cols % 16)));
  }
}

// R x T sums of sixteen lanes over some steps, continued from `lanes`.
template <int R, int T>
static inline void multiply_tile(const float* weights, const float* const* x, int64_t steps, bool fresh, Floats* lanes) {
  Floats total[T][R];
  for (int t = 0; t < T; ++t)
    for (int r = 0; r < R; ++r) total[t][r] = fresh ? splat(0.0f) : lanes[t * R + r];
  for (int64_t i = 0; i < 16 * steps; i += 16, weights += 16 * R) {
    Floats weight[R];
    for (int r = 0; r < R; ++r) weight[r] = load(weights + 16 * r);
    for (int t = 0; t < T; ++t) {
      const Floats value = load(x[t] + i);
      for (int r = 0; r < R; ++r) total[t][r] = fma(weight[r], value, total[t][r]);
    }
  }
  for (int t = 0; t < T; ++t)
    for (int r = 0; r < R; ++r) lanes[t * R + r] = total[t][r];
}

template <class Codes>
static inline void multiply_panel(const Matrix& m, const uint8_t* codes, const WideScales& wide, int rows, const uint8_t* const* x,
                                  int tokens, float* out) {
  float* panel = scratch<float>(Scratch::panel, block_rows * block_steps * 16);
  Floats* partial = scratch<Floats>(Scratch::sums, block_rows * block_tokens);
  for (int64_t from = 0; from < m.steps(); from += block_steps) {
    const int64_t steps = m.steps() - from < block_steps ? m.steps() - from : block_steps;
    over_tiles<float_rows>(rows, [&](int row, auto R) {
      unpack<Codes, R>(m, codes + row * m.row_bytes(), wide, row, from, steps, panel + row * block_steps * 16);
    });
    for (int token = 0; token < tokens; token += float_tokens) {
      const int some = tokens - token < float_tokens ? tokens - token : float_tokens;
      const float* at[float_tokens];
      for (int t = 0; t < some; ++t) at[t] = reinterpret_cast<const float*>(x[token + t]) + 16 * from;
      over_tiles<float_rows>(rows, [&](int row, auto R) {
        Floats* lanes = partial + token * block_rows + row * some;
        with_constant<float_tokens>(some, [&](auto T) {
          multiply_tile<R, T>(panel + row * block_steps * 16, at, steps, from == 0, lanes);
          if (from + steps == m.steps())
            for (int t = 0; t < T; ++t) sum_each<R>(lanes + t * R, out + (token + t) * block_rows + row);
        });
      });
    }
  }
}

template <class Codes>
static inline void multiply_floats(const Matrix& m, int64_t first, int rows, const uint8_t* const* x, int tokens, float* out) {
  const WideScales wide(m, first, rows);
  const auto* codes = static_cast<const uint8_t*>(m.codes) + first * m.row_bytes();
  if (tokens > 2) return multiply_panel<Codes>(m, codes, wide, rows, x, tokens, out);
  for (int t = 0; t < tokens; ++t)
    over_tiles<float_rows>(rows, [&](int row, auto R) {
      multiply_row<Codes, R>(m, codes + row * m.row_bytes(), wide, row, reinterpret_cast<const float*>(x[t]), out + t * block_rows + row);
    });
}

}  // namespace ttd::TTD_ISA
