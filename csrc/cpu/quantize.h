// Packing numbers to affine codes with the bits of mx.quantize: value = code * scale + bias, a scale and bias a group.
#pragma once

#include "numbers.h"

namespace ttd {

struct Quantize {
  int64_t groups;
  int group;  // numbers of a group: 32, 64 or 128
  int bits;   // of a code: 4 or 8
  Type type;
  const void* values;  // [groups, group]
  uint8_t* codes;      // [groups, group * bits / 8], low bits first
  Type scale_type;
  void* scales;  // [groups]
  void* biases;  // [groups]
};

// On the caller's thread alone: who packs much calls it on several.
void quantize(const Quantize& call);

}  // namespace ttd

#ifdef TTD_OPERATIONS
#include <algorithm>
#include <cmath>
#include <limits>

#include "pool.h"
#include "sixteens.h"

namespace ttd::TTD_ISA {

template <int group, class T>
static inline void range_of(const T* values, float* low, float* high) {
  Floats least = splat(std::numeric_limits<float>::infinity()), most = splat(-std::numeric_limits<float>::infinity());
  for (int i = 0; i < group / 16; ++i) {
    const Floats value = load(values + 16 * i);
    least = min(value, least);
    most = max(value, most);
  }
  *low = -largest(splat(0.0f) - least);
  *high = largest(most);
}

// The scale is corrected so that the end of the range farther from zero is a whole number of steps, hence exact, and so
// is zero. Which operand comes first decides what becomes of NaN.
template <int bits>
static inline void affine_of(const float* low, const float* high, float* scales, float* biases) {
  constexpr float bins = (1 << bits) - 1;
  for (int i = 0; i < 16; ++i) {
    const bool below = std::fabs(low[i]) > std::fabs(high[i]);
    const float step = std::max((high[i] - low[i]) / bins, 1e-7f);
    const float scale = below ? step : -step, edge = below ? low[i] : high[i];
    const float steps = std::rint(edge / scale), corrected = edge / steps;
    scales[i] = steps != 0 ? corrected : scale;
    biases[i] = steps != 0 ? edge : 0.0f;
  }
}

template <int bits, int group, class T>
static inline void pack_group(const T* values, float scale, float bias, uint8_t* codes) {
  constexpr float bins = (1 << bits) - 1;
  for (int i = 0; i < group / 16; ++i) {
    const Floats steps = (load(values + 16 * i) - splat(bias)) / splat(scale);
    const Floats code = min(max(steps, splat(0.0f)), splat(bins));
    if constexpr (bits == 4)
      store_nibbles(codes + 8 * i, code);
    else
      store(codes + 16 * i, code);
  }
}

// What MLX writes for NaN, which is not what processors make of one.
static inline void set_nan(float*, float) {}
static inline void set_nan(bf16* to, float) { to->bits = 0x7fc0; }
static inline void set_nan([[maybe_unused]] f16* to, [[maybe_unused]] float nan) {
#if defined(__x86_64__)
  to->bits = std::signbit(nan) ? 0xfd00 : 0x7d00;
#endif
}

static inline void store_affine(const Quantize& call, int64_t first, int64_t count, const float* scale, const float* bias) {
  with_type(call.scale_type, [&](auto* to) {
    auto* scales = static_cast<decltype(to)>(call.scales) + first;
    store_upto(scales, load(scale), count);
    store_upto(static_cast<decltype(to)>(call.biases) + first, load(bias), count);
    for (int64_t i = 0; i < count; ++i)
      if (std::isnan(scale[i])) set_nan(scales + i, scale[i]);
  });
}

template <int bits, int group, class T>
static void quantize_groups(const Quantize& call, const T* values) {
  constexpr int64_t bytes = group * bits / 8;
  over_sixteens(call.groups, [&](int64_t first, int64_t count) {
    float low[16] = {}, high[16] = {}, scale[16], bias[16];
    const T* from = values + first * group;
    uint8_t* codes = call.codes + first * bytes;
    for (int64_t i = 0; i < count; ++i) range_of<group>(from + i * group, low + i, high + i);
    affine_of<bits>(low, high, scale, bias);
    for (int64_t i = 0; i < count; ++i) pack_group<bits, group>(from + i * group, scale[i], bias[i], codes + i * bytes);
    store_affine(call, first, count, scale, bias);
  });
}

static void quantize(const Quantize& call) {
  const FloatMode mode(Denormals::kept);
  with_type(call.type, [&](auto* from) {
    const auto* values = static_cast<decltype(from)>(const_cast<void*>(call.values));
    const auto with_bits = [&](auto bits) {
      if (call.group == 32) quantize_groups<bits, 32>(call, values);
      if (call.group == 64) quantize_groups<bits, 64>(call, values);
      if (call.group == 128) quantize_groups<bits, 128>(call, values);
    };
    if (call.bits == 4) with_bits(std::integral_constant<int, 4>());
    if (call.bits == 8) with_bits(std::integral_constant<int, 8>());
  });
}

}  // namespace ttd::TTD_ISA
#endif
