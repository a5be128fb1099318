// simd.h on AVX-512.
#pragma once

#include <immintrin.h>

namespace ttd::avx512 {

struct Floats {
  __m512 v;
};

static inline Floats splat(float x) { return {_mm512_set1_ps(x)}; }
static inline Floats load(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline Floats load(const bf16* p) {
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16))};
}
static inline Floats load(const f16* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
static inline Floats load(const uint8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
static inline void store(float* p, Floats a) { _mm512_storeu_ps(p, a.v); }
static inline void store(bf16* p, Floats a) {
  const __m512i bits = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_epi32(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  const __m512i kept = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(1 << 22));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16)));
}
static inline void store(f16* p, Floats a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// Whole numbers nearest to a.
static inline void store(int32_t* p, Floats a) { _mm512_storeu_si512(p, _mm512_cvtps_epi32(a.v)); }
static inline void store(uint8_t* p, Floats a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v)));
}

// Whole numbers nearest to a, of 4 bits each: eight bytes, low bits first.
static inline void store_nibbles(uint8_t* p, Floats a) {
  const __m128i bytes = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v));
  const __m128i pairs = _mm_maddubs_epi16(bytes, _mm_set1_epi16(0x1001));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_cvtepi16_epi8(pairs));
}

static inline Floats operator+(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline Floats operator-(Floats a, Floats b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline Floats operator*(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline Floats operator/(Floats a, Floats b) { return {_mm512_div_ps(a.v, b.v)}; }
static inline Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
static inline Floats min(Floats a, Floats b) { return {_mm512_min_ps(a.v, b.v)}; }
static inline Floats max(Floats a, Floats b) { return {_mm512_max_ps(a.v, b.v)}; }
static inline Floats round(Floats a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }

// a * 2^n for whole n.
static inline Floats scale_by_power(Floats a, Floats n) { return {_mm512_scalef_ps(a.v, n.v)}; }

// b, and a NaN where a is one.
static inline Floats select_nan(Floats a, Floats b) {
  return {_mm512_mask_mov_ps(b.v, _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q), a.v)};
}

// The sum of the lanes: l and l + 8, then l and l + 4, l + 2, l + 1.
static inline float sum(Floats a) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}

static inline float largest(Floats a) { return _mm512_reduce_max_ps(a.v); }

// Four sums at once, each with the bits of `sum`.
static inline void sums(Floats a, Floats b, Floats c, Floats d, float* out) {
  const __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a.v, b.v, 0x44), _mm512_shuffle_f32x4(a.v, b.v, 0xee));
  const __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c.v, d.v, 0x44), _mm512_shuffle_f32x4(c.v, d.v, 0xee));
  __m512 all = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
  all = _mm512_add_ps(all, _mm512_permute_ps(all, 0x4e));
  all = _mm512_add_ps(all, _mm512_permute_ps(all, 0xb1));
  _mm_storeu_ps(out, _mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, all)));
}

// 128 codes of 4 bits: the low and the high one of each byte.
struct Nibbles {
  __m512i low, high;
};

static inline Nibbles split(__m512i bytes) {
  const __m512i mask = _mm512_set1_epi8(15);
  return {_mm512_and_si512(bytes, mask), _mm512_and_si512(_mm512_srli_epi32(bytes, 4), mask)};
}
static inline Nibbles nibbles(const uint8_t* p) { return split(_mm512_loadu_si512(p)); }
static inline Nibbles some_nibbles(const uint8_t* p, int bytes) {
  return split(_mm512_maskz_loadu_epi8(~0ull >> (64 - bytes), p));
}

// For each of R rows of codes: sums of code times activation over each lane's eight codes, exact until they become
// floats. The rows' chains of additions run side by side.
template <int R>
static inline void dot(const Nibbles* codes, const FixedBlock& x, Floats* out) {
  __m512i total[R];
  for (int r = 0; r < R; ++r) total[r] = _mm512_setzero_si512();
  for (int limb = 0; limb < 3; ++limb) {
    const __m512i even = _mm512_load_si512(x.even[limb]), odd = _mm512_load_si512(x.odd[limb]);
    for (int r = 0; r < R; ++r) total[r] = _mm512_dpbusd_epi32(total[r], codes[r].low, even);
    for (int r = 0; r < R; ++r) total[r] = _mm512_dpbusd_epi32(total[r], codes[r].high, odd);
    if (limb < 2)
      for (int r = 0; r < R; ++r) total[r] = _mm512_slli_epi32(total[r], 8);
  }
  for (int r = 0; r < R; ++r) out[r] = {_mm512_cvtepi32_ps(total[r])};
}

// Sixteen groups' scales, and each lane's own within block b of 128 columns.
using Scales = Floats;
template <int group>
static inline Floats spread(const Scales& scales, int b) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i first = _mm512_srli_epi32(lane, group == 32 ? 2 : group == 64 ? 3 : 4);
  return {_mm512_permutexvar_ps(_mm512_add_epi32(first, _mm512_set1_epi32(b * (128 / group))), scales.v)};
}
static inline Scales keep(Floats scales) { return scales; }

static inline __mmask16 first_lanes(int count) { return static_cast<__mmask16>((1u << count) - 1u); }
static inline Floats load_some(const float* p, int count) { return {_mm512_maskz_loadu_ps(first_lanes(count), p)}; }
static inline Floats load_some(const bf16* p, int count) {
  const __m256i raw = _mm256_maskz_loadu_epi16(first_lanes(count), p);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16))};
}
static inline Floats load_some(const f16* p, int count) {
  return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(count), p))};
}

// Rows of weights and of activations that are multiplied at once: as many as there are registers for.
constexpr int float_rows = 4, float_tokens = 6;
constexpr int int4_rows = 4, int4_rows_of_many = 2, int4_tokens = 6;

}  // namespace ttd::avx512
