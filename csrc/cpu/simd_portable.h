// simd.h in plain C++. Where the target has a fused multiply-add (NEON) its sums have the bits of the x86 forms.
#pragma once

#include <cmath>

namespace ttd::portable {

struct Floats {
  float v[16];
};

template <class F>
static inline Floats each(F f) {
  Floats out;
  for (int i = 0; i < 16; ++i) out.v[i] = f(i);
  return out;
}

static inline float widen(bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

static inline uint16_t narrow(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return static_cast<uint16_t>(nan ? bits >> 16 | 64u : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

static inline float widen(f16 x) {
  const uint32_t sign = (x.bits & 0x8000u) << 16, exponent = x.bits >> 10 & 31u, mantissa = x.bits & 1023u;
  if (exponent == 0) {
    const float value = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -value : value;
  }
  const uint32_t bits = sign | (exponent == 31 ? 255u : exponent + 112u) << 23 | mantissa << 13;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

static inline uint16_t narrow_half(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | (magnitude >> 13 & 1023u));
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x38800000u) return static_cast<uint16_t>(sign | static_cast<uint32_t>(std::nearbyint(std::fabs(x) * 0x1p24f)));
  return static_cast<uint16_t>(sign | (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13);
}

static inline Floats splat(float x) { return each([=](int) { return x; }); }
static inline Floats load(const float* p) { return each([=](int i) { return p[i]; }); }
static inline Floats load(const bf16* p) { return each([=](int i) { return widen(p[i]); }); }
static inline Floats load(const f16* p) { return each([=](int i) { return widen(p[i]); }); }
static inline Floats load(const uint8_t* p) { return each([=](int i) { return static_cast<float>(p[i]); }); }
static inline void store(float* p, Floats a) {
  for (int i = 0; i < 16; ++i) p[i] = a.v[i];
}
static inline void store(bf16* p, Floats a) {
  for (int i = 0; i < 16; ++i) p[i].bits = narrow(a.v[i]);
}
static inline void store(f16* p, Floats a) {
  for (int i = 0; i < 16; ++i) p[i].bits = narrow_half(a.v[i]);
}

static inline Floats operator+(Floats a, Floats b) { return each([&](int i) { return a.v[i] + b.v[i]; }); }
static inline Floats operator-(Floats a, Floats b) { return each([&](int i) { return a.v[i] - b.v[i]; }); }
static inline Floats operator*(Floats a, Floats b) { return each([&](int i) { return a.v[i] * b.v[i]; }); }
static inline Floats operator/(Floats a, Floats b) { return each([&](int i) { return a.v[i] / b.v[i]; }); }
static inline Floats fma(Floats a, Floats b, Floats c) {
#if defined(__FP_FAST_FMAF) || defined(__aarch64__)
  return each([&](int i) { return __builtin_fmaf(a.v[i], b.v[i], c.v[i]); });
#else
  return each([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
#endif
}
static inline Floats min(Floats a, Floats b) { return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
static inline Floats max(Floats a, Floats b) { return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
static inline Floats round(Floats a) { return each([&](int i) { return std::nearbyint(a.v[i]); }); }

// a * 2^n for whole n.
static inline Floats scale_by_power(Floats a, Floats n) {
  return each([&](int i) { return std::ldexp(a.v[i], static_cast<int>(n.v[i])); });
}

// b, and a NaN where a is one.
static inline Floats select_nan(Floats a, Floats b) {
  return each([&](int i) { return a.v[i] == a.v[i] ? b.v[i] : a.v[i]; });
}

// The sum of the lanes: l and l + 8, then l and l + 4, l + 2, l + 1.
static inline float sum(Floats a) {
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) a.v[i] = a.v[i] + a.v[i + half];
  return a.v[0];
}

static inline float largest(Floats a) {
  float best = a.v[0];
  for (int i = 1; i < 16; ++i) best = a.v[i] > best ? a.v[i] : best;
  return best;
}

// Four sums at once, each with the bits of `sum`.
static inline void sums(Floats a, Floats b, Floats c, Floats d, float* out) {
  out[0] = sum(a);
  out[1] = sum(b);
  out[2] = sum(c);
  out[3] = sum(d);
}

// The 32-bit words of a group of 4-bit codes; lanes of repeat r start at nibble r * steps.
template <int steps>
struct Nibbles {
  uint32_t words[16];
};

template <int steps>
static inline Nibbles<steps> nibbles(const uint8_t* p) {
  Nibbles<steps> out;
  constexpr int words = 2 * steps;
  for (int i = 0; i < 16; ++i) {
    uint32_t word;
    std::memcpy(&word, p + 4 * (i % words), 4);
    out.words[i] = word >> (4 * steps * (i / words));
  }
  return out;
}

// The values that a code stands for: fma(code, scale, bias).
struct Levels {
  Floats scale, bias;

  template <int steps, int step>
  inline Floats at(const Nibbles<steps>& n) const {
    return fma(each([&](int i) { return static_cast<float>(n.words[i] >> (4 * step) & 15u); }), scale, bias);
  }
};

static inline Levels levels(float scale, float bias) { return {splat(scale), splat(bias)}; }

constexpr int tile_rows = 2, tile_tokens = 2, direct_tokens = 1;

}  // namespace ttd::portable
