// Root mean square norms of rows, with the gate or the rotary embedding that follows them.
#pragma once

#include "numbers.h"

namespace ttd {

// x * rsqrt(mean x^2 + eps) * weight, times silu(gate) if there is one.
struct RmsNorm {
  int64_t rows, width;
  float eps;
  Type x_type;
  const void* x;        // [rows, width]
  const float* weight;  // [width]
  Type out_type;
  const void* gate;  // [rows, width] of out_type, or null
  void* out;         // [rows, width]
};

void rms_norm(const RmsNorm& call);

// The norm of each head, then the rotation of its first `rotated` channels, whose halves are paired.
struct NormRope {
  int64_t tokens, heads, head_dim, rotated, offset;  // token t stands at position offset + t
  float eps;
  double theta;
  Type type;
  const void* x;        // [tokens, heads, head_dim]
  const float* weight;  // [head_dim]
  void* out;            // [tokens, heads, head_dim]
};

void norm_rope(const NormRope& call);

}  // namespace ttd

#ifdef TTD_OPERATIONS
#include <cmath>

#include "pool.h"
#include "sixteens.h"

namespace ttd::TTD_ISA {

template <class T>
static inline Floats inverse_rms(const T* x, int64_t width, float eps) {
  Floats squares = splat(0.0f);
  over_sixteens(width, [&](int64_t i, int64_t n) {
    const Floats value = load_upto(x + i, n);
    squares = fma(value, value, squares);
  });
  return splat(1.0f / std::sqrt(sum(squares) / static_cast<float>(width) + eps));
}

template <class X, class Out>
static inline void norm_row(const X* x, const float* weight, const Out* gate, int64_t width, float eps, Out* out) {
  const Floats factor = inverse_rms(x, width, eps);
  over_sixteens(width, [&](int64_t i, int64_t n) {
    Floats value = load_upto(x + i, n) * factor * load_upto(weight + i, n);
    if (gate) value = value * silu(load_upto(gate + i, n));
    store_upto(out + i, value, n);
  });
}

static void rms_norm(const RmsNorm& call) {
  const FloatMode mode(Denormals::kept);
  const int64_t together = call.width < numbers_per_chunk ? numbers_per_chunk / call.width : 1;
  with_type(call.x_type, [&](auto* from) {
    with_type(call.out_type, [&](auto* to) {
      const auto* x = static_cast<decltype(from)>(const_cast<void*>(call.x));
      const auto* gate = static_cast<decltype(to)>(const_cast<void*>(call.gate));
      auto* out = static_cast<decltype(to)>(call.out);
      parallel_for((call.rows + together - 1) / together, [&](int64_t chunk) {
        for (int64_t row = chunk * together; row < call.rows && row < (chunk + 1) * together; ++row) {
          const int64_t at = row * call.width;
          norm_row(x + at, call.weight, gate ? gate + at : gate, call.width, call.eps, out + at);
        }
      });
    });
  });
}

// Rotates the pairs (x[i], x[i + half]) by their angles.
static inline void rotate(float* x, const float* cosines, const float* sines, int64_t half) {
  over_sixteens(half, [&](int64_t i, int64_t n) {
    const Floats a = load_upto(x + i, n), b = load_upto(x + half + i, n);
    const Floats c = load_upto(cosines + i, n), s = load_upto(sines + i, n);
    store_upto(x + i, a * c - b * s, n);
    store_upto(x + half + i, a * s + b * c, n);
  });
}

static void norm_rope(const NormRope& call) {
  if (call.heads == 0) return;
  const FloatMode mode(Denormals::kept);
  const int64_t half = call.rotated / 2, width = call.heads * call.head_dim;
  float* frequencies = scratch<float>(Scratch::inputs, half);
  for (int64_t i = 0; i < half; ++i)
    frequencies[i] = static_cast<float>(std::pow(call.theta, -2.0 * static_cast<double>(i) / static_cast<double>(call.rotated)));
  const int64_t together = width < numbers_per_chunk ? numbers_per_chunk / width : 1;
  with_type(call.type, [&](auto* kind) {
    using T = std::remove_pointer_t<decltype(kind)>;
    parallel_for((call.tokens + together - 1) / together, [&](int64_t chunk) {
      float* cosines = scratch<float>(Scratch::products, 2 * half + call.head_dim);
      float *sines = cosines + half, *row = sines + half;
      for (int64_t t = chunk * together; t < call.tokens && t < (chunk + 1) * together; ++t) {
        for (int64_t i = 0; i < half; ++i) {
          // The angle is rounded to f32, as in the implementations that the models were trained with.
          const float angle = static_cast<float>(call.offset + t) * frequencies[i];
          cosines[i] = static_cast<float>(std::cos(static_cast<double>(angle)));
          sines[i] = static_cast<float>(std::sin(static_cast<double>(angle)));
        }
        for (int64_t h = 0; h < call.heads; ++h) {
          const int64_t at = t * width + h * call.head_dim;
          norm_row(static_cast<const T*>(call.x) + at, call.weight, static_cast<const float*>(nullptr), call.head_dim, call.eps, row);
          rotate(row, cosines, sines, half);
          T* out = static_cast<T*>(call.out) + at;
          over_sixteens(call.head_dim, [&](int64_t i, int64_t n) { store_upto(out + i, load_upto(row + i, n), n); });
        }
      }
    });
  });
}

}  // namespace ttd::TTD_ISA
#endif
