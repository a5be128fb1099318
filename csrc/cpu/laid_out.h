// Rows of activations in the form that `multiply` reads.
#pragma once

#include <cmath>

#include "matrix.h"
#include "simd.h"

namespace ttd::TTD_ISA {

// Before 4-bit codes: integers, their sum in each group of columns, and the unit that both are in. A row with an
// infinity or NaN has a NaN for its unit; one of nothing above 2^-100 has zero.
struct FixedRow {
  float unit;
  const float* sums;         // [m.groups(), zeros up to a multiple of 16]
  const FixedBlock* blocks;  // [columns / 128, zeros at the end]
};

static inline int64_t padded_groups(const Matrix& m) { return (m.groups() + 15) / 16 * 16; }
static inline int64_t fixed_blocks(const Matrix& m) { return (m.cols + 127) / 128; }

// Bytes of one laid-out row, a multiple of 64 that does not keep rows at the same place in the cache.
static inline int64_t row_size(const Matrix& m) {
  if (m.rounded) return 2 * m.cols + 64;
  if (m.format != Format::int4) return 64 * (m.steps() + 1);
  return 64 + 4 * padded_groups(m) + static_cast<int64_t>(sizeof(FixedBlock)) * fixed_blocks(m);
}

static inline FixedRow fixed_row(const Matrix& m, const uint8_t* row) {
  const auto* sums = reinterpret_cast<const float*>(row + 64);
  return {*reinterpret_cast<const float*>(row), sums, reinterpret_cast<const FixedBlock*>(sums + padded_groups(m))};
}

// Units in which `largest` is at most fixed_limit and more than half of it.
static inline float fixed_unit(float largest) {
  if (!(largest <= 3.4028234e38f)) return std::nanf("");
  if (largest < 0x1p-100f) return 0.0f;
  const float unit = std::ldexp(1.0f, std::ilogb(largest) - 22);
  return std::rint(largest / unit) > fixed_limit ? 2 * unit : unit;
}

template <class T>
static inline float largest_magnitude(const T* x, int64_t count) {
  Floats most = splat(0.0f), poison = splat(0.0f);
  for (int64_t i = 0; i < count; i += 16) {
    const Floats value = load(x + i);
    most = max(most, max(value, splat(0.0f) - value));
    poison = fma(value, splat(0.0f), poison);
  }
  return largest(most) + sum(poison);
}

// 128 integers as balanced bytes.
static inline void split_bytes(const int32_t* whole, FixedBlock* block) {
  for (int limb = 0; limb < 3; ++limb) {
    int8_t bytes[128];
    for (int i = 0; i < 128; ++i) {
      const int32_t above = (whole[i] + 128) >> 8;
      bytes[i] = static_cast<int8_t>(limb == 2 ? whole[i] : limb == 1 ? above : (above + 128) >> 8);
    }
    uint16_t pairs[64];
    std::memcpy(pairs, bytes, sizeof pairs);
    for (int i = 0; i < 64; ++i) {
      block->even[limb][i] = static_cast<int8_t>(pairs[i]);
      block->odd[limb][i] = static_cast<int8_t>(pairs[i] >> 8);
    }
  }
}

template <class T>
static inline void lay_out_fixed(const Matrix& m, const T* x, uint8_t* row) {
  const float unit = fixed_unit(largest_magnitude(x, m.cols));
  const Floats scale = splat(unit > 0 ? 1.0f / unit : 0.0f);
  auto* sums = reinterpret_cast<float*>(row + 64);
  auto* block = reinterpret_cast<FixedBlock*>(sums + padded_groups(m));
  *reinterpret_cast<float*>(row) = unit;
  for (int64_t g = m.groups(); g < padded_groups(m); ++g) sums[g] = 0.0f;
  for (int64_t from = 0; from < m.cols; from += 128, ++block) {
    const int count = static_cast<int>(m.cols - from < 128 ? m.cols - from : 128);
    alignas(64) int32_t whole[128] = {};
    if (unit > 0)
      for (int i = 0; i < count; i += 16) store(whole + i, load(x + from + i) * scale);
    for (int g = 0; g < count; g += m.group) {
      int32_t part[16] = {};
      for (int i = g; i < g + m.group; i += 16)
        for (int lane = 0; lane < 16; ++lane) part[lane] += whole[i + lane];
      int32_t sum = 0;
      for (int lane = 0; lane < 16; ++lane) sum += part[lane];
      *sums++ = static_cast<float>(sum);
    }
    split_bytes(whole, block);
  }
}

// x [m.cols] to row_size(m) bytes: bf16 before rounded products, integers before other 4-bit codes, else floats with zeros up to a multiple of 16.
template <class T>
static inline void lay_out(const Matrix& m, const T* x, uint8_t* row) {
  if (m.rounded) {
    auto* out = reinterpret_cast<bf16*>(row);
    for (int64_t i = 0; i < m.cols; i += 16) store(out + i, load(x + i));
    return;
  }
  if (m.format == Format::int4) return lay_out_fixed(m, x, row);
  auto* out = reinterpret_cast<float*>(row);
  int64_t i = 0;
  for (; i + 16 <= m.cols; i += 16) store(out + i, load(x + i));
  if (i < m.cols) store(out + i, load_some(x + i, static_cast<int>(m.cols - i)));
}

}  // namespace ttd::TTD_ISA
