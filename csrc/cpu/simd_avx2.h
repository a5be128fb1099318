// simd.h on AVX2 with FMA and F16C: two registers of eight.
#pragma once

#include <immintrin.h>

namespace ttd::avx2 {

struct Floats {
  __m256 lo, hi;
};

static inline __m256 widen(__m128i raw) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16)); }

static inline __m128i narrow(__m256 value) {
  const __m256i bits = _mm256_castps_si256(value);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
  const __m256i kept = _mm256_blendv_epi8(rounded, _mm256_or_si256(bits, _mm256_set1_epi32(1 << 22)), nan);
  const __m256i high = _mm256_srli_epi32(kept, 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
}

static inline const __m128i* words(const void* p) { return static_cast<const __m128i*>(p); }

static inline Floats splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline Floats load(const bf16* p) { return {widen(_mm_loadu_si128(words(p))), widen(_mm_loadu_si128(words(p + 8)))}; }
static inline Floats load(const f16* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(words(p))), _mm256_cvtph_ps(_mm_loadu_si128(words(p + 8)))};
}
static inline Floats load(const uint8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(words(p)))),
          _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(words(p + 8))))};
}
static inline void store(float* p, Floats a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
static inline void store(bf16* p, Floats a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(a.lo));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), narrow(a.hi));
}
static inline void store(f16* p, Floats a) {
  constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.lo, nearest));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(a.hi, nearest));
}

// Whole numbers nearest to a.
static inline void store(int32_t* p, Floats a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_cvtps_epi32(a.lo));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), _mm256_cvtps_epi32(a.hi));
}
static inline __m128i nearest_bytes(Floats a) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)), 0xd8);
  return _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}
static inline void store(uint8_t* p, Floats a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), nearest_bytes(a)); }

// Whole numbers nearest to a, of 4 bits each: eight bytes, low bits first.
static inline void store_nibbles(uint8_t* p, Floats a) {
  const __m128i pairs = _mm_maddubs_epi16(nearest_bytes(a), _mm_set1_epi16(0x1001));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(pairs, pairs));
}

static inline Floats operator+(Floats a, Floats b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
static inline Floats operator-(Floats a, Floats b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
static inline Floats operator*(Floats a, Floats b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
static inline Floats operator/(Floats a, Floats b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
static inline Floats fma(Floats a, Floats b, Floats c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
static inline Floats min(Floats a, Floats b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
static inline Floats max(Floats a, Floats b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
static inline Floats round(Floats a) {
  constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, nearest), _mm256_round_ps(a.hi, nearest)};
}

// a * 2^n for whole n in [-252, 254]: two steps, since one power of two does not reach that far.
static inline __m256 power_of_two(__m256i n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
static inline __m256 scale_by_power(__m256 a, __m256 n) {
  const __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1);
  return _mm256_mul_ps(_mm256_mul_ps(a, power_of_two(half)), power_of_two(_mm256_sub_epi32(whole, half)));
}
static inline Floats scale_by_power(Floats a, Floats n) { return {scale_by_power(a.lo, n.lo), scale_by_power(a.hi, n.hi)}; }

// b, and a NaN where a is one.
static inline Floats select_nan(Floats a, Floats b) {
  return {_mm256_blendv_ps(b.lo, a.lo, _mm256_cmp_ps(a.lo, a.lo, _CMP_UNORD_Q)),
          _mm256_blendv_ps(b.hi, a.hi, _mm256_cmp_ps(a.hi, a.hi, _CMP_UNORD_Q))};
}

// The sum of the lanes: l and l + 8, then l and l + 4, l + 2, l + 1.
static inline float sum(Floats a) {
  const __m256 eight = _mm256_add_ps(a.lo, a.hi);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

static inline float largest(Floats a) {
  const __m256 eight = _mm256_max_ps(a.lo, a.hi);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

// Four sums at once, each with the bits of `sum`.
static inline void sums(Floats a, Floats b, Floats c, Floats d, float* out) {
  const __m256 ea = _mm256_add_ps(a.lo, a.hi), eb = _mm256_add_ps(b.lo, b.hi);
  const __m256 ec = _mm256_add_ps(c.lo, c.hi), ed = _mm256_add_ps(d.lo, d.hi);
  const __m256 ab = _mm256_add_ps(_mm256_permute2f128_ps(ea, eb, 0x20), _mm256_permute2f128_ps(ea, eb, 0x31));
  const __m256 cd = _mm256_add_ps(_mm256_permute2f128_ps(ec, ed, 0x20), _mm256_permute2f128_ps(ec, ed, 0x31));
  const __m256 acbd = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
  const __m256 two = _mm256_add_ps(acbd, _mm256_permute_ps(acbd, 0xb1));
  const __m128 ac = _mm256_castps256_ps128(two), bd = _mm256_extractf128_ps(two, 1);
  _mm_storeu_ps(out, _mm_unpacklo_ps(_mm_shuffle_ps(ac, ac, 0x08), _mm_shuffle_ps(bd, bd, 0x08)));
}

// 128 codes of 4 bits: the low and the high one of each byte.
struct Nibbles {
  __m256i low[2], high[2];
};

static inline Nibbles nibbles(const uint8_t* p) {
  const __m256i mask = _mm256_set1_epi8(15);
  Nibbles out;
  for (int half = 0; half < 2; ++half) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32 * half));
    out.low[half] = _mm256_and_si256(bytes, mask);
    out.high[half] = _mm256_and_si256(_mm256_srli_epi32(bytes, 4), mask);
  }
  return out;
}
static inline Nibbles some_nibbles(const uint8_t* p, int bytes) {
  uint8_t all[64] = {};
  std::memcpy(all, p, static_cast<size_t>(bytes));
  return nibbles(all);
}

// Sums of code times activation over each lane's eight codes, exact until they become floats: four products of at most
// 15 * 128 fit the sixteen bits that pairs are added in.
static inline Floats dot(const Nibbles& codes, const FixedBlock& x) {
  const auto half = [&](int h) {
    __m256i total = _mm256_setzero_si256();
    for (int limb = 0; limb < 3; ++limb) {
      const __m256i even = _mm256_load_si256(reinterpret_cast<const __m256i*>(x.even[limb]) + h);
      const __m256i odd = _mm256_load_si256(reinterpret_cast<const __m256i*>(x.odd[limb]) + h);
      const __m256i pairs = _mm256_add_epi16(_mm256_maddubs_epi16(codes.low[h], even), _mm256_maddubs_epi16(codes.high[h], odd));
      total = _mm256_add_epi32(_mm256_slli_epi32(total, 8), _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    return _mm256_cvtepi32_ps(total);
  };
  return {half(0), half(1)};
}

template <int R>
static inline void dot(const Nibbles* codes, const FixedBlock& x, Floats* out) {
  for (int r = 0; r < R; ++r) out[r] = dot(codes[r], x);
}

// Sixteen groups' scales, and each lane's own within block b of 128 columns.
struct Scales {
  float at[16];
};
template <int group>
static inline Floats spread(const Scales& scales, int b) {
  const float* at = scales.at + b * (128 / group);
  if constexpr (group == 128) return splat(at[0]);
  if constexpr (group == 64) return {_mm256_set1_ps(at[0]), _mm256_set1_ps(at[1])};
  const auto two = [](const float* p) { return _mm256_blend_ps(_mm256_set1_ps(p[0]), _mm256_set1_ps(p[1]), 0xf0); };
  return {two(at), two(at + 2)};
}
static inline Scales keep(Floats scales) {
  Scales out;
  store(out.at, scales);
  return out;
}

template <class T>
static inline Floats load_some(const T* p, int count) {
  T lanes[16] = {};
  std::memcpy(lanes, p, static_cast<size_t>(count) * sizeof(T));
  return load(lanes);
}

// See simd_avx512.h; there are half as many registers of half the width.
constexpr int float_rows = 2, float_tokens = 3;
constexpr int int4_rows = 2, int4_rows_of_many = 1, int4_tokens = 2;

}  // namespace ttd::avx2
