// Sixteen floats, whatever the registers: the same lanes and the same order of sums on every instruction set.
// The including file is compiled once for each; everything here is internal to it.
#pragma once

#include <cstdint>
#include <cstring>

#include "fixed_block.h"
#include "numbers.h"

#if defined(__AVX512F__) && defined(__AVX512VNNI__)
#define TTD_ISA avx512
#include "simd_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define TTD_ISA avx2
#include "simd_avx2.h"
#else
#define TTD_ISA portable
#include "simd_portable.h"
#endif

namespace ttd::TTD_ISA {

// Starts to read what lies 4 KB on: the hardware follows one stream a page, and rows that are read side by side are
// several.
static inline void read_ahead(const void* p) { __builtin_prefetch(static_cast<const char*>(p) + 4096, 0, 3); }

template <class T>
static inline void store_some(T* to, Floats value, int count) {
  T lanes[16];
  store(lanes, value);
  std::memcpy(to, lanes, static_cast<size_t>(count) * sizeof(T));
}

// exp to about 1 ulp: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2]. Below -87.3 it stays at 1.2e-38 and above
// 88.7 at 3.4e38, at infinities too: never 0 or infinity. NaN gives NaN.
static inline Floats exp(Floats x) {
  const Floats clamped = min(max(x, splat(-87.33654f)), splat(88.72283f));
  const Floats n = round(clamped * splat(1.44269504f));
  Floats r = fma(n, splat(-0.693359375f), clamped);
  r = fma(n, splat(2.12194440e-4f), r);
  Floats p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r + splat(1.0f));
  return select_nan(x, scale_by_power(p, n));
}

static inline Floats sigmoid(Floats x) { return splat(1.0f) / (splat(1.0f) + exp(splat(0.0f) - x)); }

static inline Floats silu(Floats x) { return x * sigmoid(x); }

}  // namespace ttd::TTD_ISA
