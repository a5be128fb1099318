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

// The 32-bit words of a group of 4-bit codes, repeated to fill sixteen lanes; lanes of repeat r start at nibble r * steps.
template <int steps>
struct Nibbles {
  __m512i words;
};

template <int steps>
static inline Nibbles<steps> nibbles(const uint8_t* p) {
  if constexpr (steps == 8) {
    return {_mm512_loadu_si512(p)};
  } else if constexpr (steps == 4) {
    const __m512i words = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {words};
  } else {
    return {_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
  }
}

// The sixteen values that a code can stand for: fma(code, scale, bias).
struct Levels {
  __m512 table;

  template <int steps, int step>
  inline Floats at(const Nibbles<steps>& n) const {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i repeat = _mm512_srli_epi32(lane, steps == 8 ? 4 : steps == 4 ? 3 : 2);
    const __m512i shift = _mm512_add_epi32(_mm512_slli_epi32(repeat, steps == 4 ? 4 : 3), _mm512_set1_epi32(4 * step));
    return {_mm512_permutexvar_ps(_mm512_srlv_epi32(n.words, shift), table)};
  }
};

static inline Levels levels(float scale, float bias) {
  const __m512 code = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return {_mm512_fmadd_ps(code, _mm512_set1_ps(scale), _mm512_set1_ps(bias))};
}

// How many rows of weights and of activations are multiplied at once, and the most of the latter for which unpacking
// weights straight into the multiplication pays.
constexpr int tile_rows = 4, tile_tokens = 6, direct_tokens = 4;

}  // namespace ttd::avx512
