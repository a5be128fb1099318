// Keys or values as they are kept: plain numbers, or codes of 8 bits in groups along head_dim.
#pragma once

#include "numbers.h"

namespace ttd {

// [key_heads, capacity, head_dim]; codes where there are scales.
struct KeptRows {
  Type type;                    // of plain numbers
  const void* numbers;          // those, or the codes
  int64_t group;                // 32, 64 or 128, which divides head_dim
  const bf16 *scales, *biases;  // [key_heads, capacity, head_dim / group], null for plain numbers
};

}  // namespace ttd

#ifdef TTD_OPERATIONS
#include "pool.h"
#include "sixteens.h"

namespace ttd::TTD_ISA {

// A few rows of plain numbers.
template <class T>
struct Numbers {
  const T* numbers;
  int64_t dim;

  Numbers(const T* numbers, int64_t dim) : numbers(numbers), dim(dim) {}
  Numbers(const KeptRows& rows, int64_t first, int64_t, int64_t dim)
      : Numbers(static_cast<const T*>(rows.numbers) + first * dim, dim) {}
  Floats at(int64_t row, int64_t i, int64_t n) const { return load_upto(numbers + row * dim + i, n); }
  void ask_for(int64_t row, int64_t i) const { __builtin_prefetch(numbers + row * dim + i, 0, 2); }
};

// A few rows of codes, their scales and biases made floats.
template <int group>
struct Codes {
  const uint8_t* codes;
  const float *scales, *biases;
  int64_t dim, groups;

  Codes(const KeptRows& rows, int64_t first, int64_t count, int64_t dim)
      : codes(static_cast<const uint8_t*>(rows.numbers) + first * dim), dim(dim), groups(dim / group) {
    const int64_t all = count * groups;
    float* wide = scratch<float>(Scratch::scales, 2 * round_up(all));
    scales = wide;
    biases = wide + round_up(all);
    over_sixteens(all, [&](int64_t i, int64_t n) {
      store(wide + i, load_upto(rows.scales + first * groups + i, n));
      store(wide + round_up(all) + i, load_upto(rows.biases + first * groups + i, n));
    });
  }
  Floats at(int64_t row, int64_t i, int64_t) const {
    const int64_t g = row * groups + i / group;
    return fma(load(codes + row * dim + i), splat(scales[g]), splat(biases[g]));
  }
  void ask_for(int64_t row, int64_t i) const {
    if (i % 64 == 0) __builtin_prefetch(codes + row * dim + i, 0, 2);
  }
};

// Calls f with a null pointer to what reads such rows.
template <class F>
static inline void with_rows(const KeptRows& rows, F&& f) {
  if (rows.scales == nullptr)
    return with_type(rows.type, [&](auto* type) { f(static_cast<Numbers<std::remove_pointer_t<decltype(type)>>*>(nullptr)); });
  if (rows.group == 32) f(static_cast<Codes<32>*>(nullptr));
  if (rows.group == 64) f(static_cast<Codes<64>*>(nullptr));
  if (rows.group == 128) f(static_cast<Codes<128>*>(nullptr));
}

}  // namespace ttd::TTD_ISA
#endif
