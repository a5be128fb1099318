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

// Whole numbers nearest to a.
static inline void store(int32_t* p, Floats a) {
  for (int i = 0; i < 16; ++i) p[i] = static_cast<int32_t>(std::nearbyint(a.v[i]));
}
// From 2^23 on floats are whole numbers one apart, so that adding it rounds, and leaves a small number in the low bits.
static inline void store(uint8_t* p, Floats a) {
  for (int i = 0; i < 16; ++i) {
    const float value = a.v[i] + 0x1p23f;
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    p[i] = static_cast<uint8_t>(bits);
  }
}

// Whole numbers nearest to a, of 4 bits each: eight bytes, low bits first.
static inline void store_nibbles(uint8_t* p, Floats a) {
  uint8_t bytes[16];
  store(bytes, a);
  for (int i = 0; i < 8; ++i) p[i] = static_cast<uint8_t>(bytes[2 * i] | bytes[2 * i + 1] << 4);
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

// 128 codes of 4 bits: the low and the high one of each byte.
struct Nibbles {
  uint8_t low[64], high[64];
};

static inline Nibbles some_nibbles(const uint8_t* p, int bytes) {
  Nibbles out = {};
  for (int i = 0; i < bytes; ++i) {
    out.low[i] = p[i] & 15u;
    out.high[i] = p[i] >> 4;
  }
  return out;
}
static inline Nibbles nibbles(const uint8_t* p) { return some_nibbles(p, 64); }

// Sums of code times activation over each lane's eight codes, exact until they become floats.
static inline Floats dot(const Nibbles& codes, const FixedBlock& x) {
  int32_t total[16] = {};
  for (int limb = 0; limb < 3; ++limb)
    for (int lane = 0; lane < 16; ++lane) {
      int32_t sum = 0;
      for (int i = 4 * lane; i < 4 * lane + 4; ++i) sum += codes.low[i] * x.even[limb][i] + codes.high[i] * x.odd[limb][i];
      total[lane] = total[lane] * 256 + sum;
    }
  return each([&](int i) { return static_cast<float>(total[i]); });
}

template <int R>
static inline void dot(const Nibbles* codes, const FixedBlock& x, Floats* out) {
  for (int r = 0; r < R; ++r) out[r] = dot(codes[r], x);
}

// Sixteen groups' scales, and each lane's own within block b of 128 columns.
using Scales = Floats;
template <int group>
static inline Floats spread(const Scales& scales, int b) {
  return each([&](int i) { return scales.v[b * (128 / group) + i * 8 / group]; });
}
static inline Scales keep(Floats scales) { return scales; }

template <class T>
static inline Floats load_some(const T* p, int count) {
  T lanes[16] = {};
  std::memcpy(lanes, p, static_cast<size_t>(count) * sizeof(T));
  return load(lanes);
}

constexpr int float_rows = 2, float_tokens = 2;
constexpr int int4_rows = 1, int4_rows_of_many = 1, int4_tokens = 1;

}  // namespace ttd::portable
