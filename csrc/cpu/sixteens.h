// Rows of numbers sixteen at a time, with what is left at their end, and tiles of constant size.
#pragma once

#include <type_traits>

#include "tiles.h"

namespace ttd::TTD_ISA {

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

static inline int64_t round_up(int64_t count) { return (count + 15) / 16 * 16; }

// The first `count` numbers, at most sixteen, and zeros after.
template <class T>
static inline Floats load_upto(const T* from, int64_t count) {
  return count >= 16 ? load(from) : load_some(from, static_cast<int>(count));
}

template <class T>
static inline void store_upto(T* to, Floats value, int64_t count) {
  if (count >= 16)
    store(to, value);
  else
    store_some(to, value, static_cast<int>(count));
}

// f(i, n) for every sixteenth i of a row, of whose numbers from i on n are left, at most sixteen.
template <class F>
static inline void over_sixteens(int64_t width, F&& f) {
  int64_t i = 0;
  for (; i + 16 <= width; i += 16) f(i, int64_t{16});
  if (i < width) f(i, width - i);
}

// f(first, R) over tiles of `most` that cover [0, count), the last of them smaller.
template <int most, class F>
static inline void over_tiles_of(int64_t count, F&& f) {
  int64_t first = 0;
  for (; first + most <= count; first += most) f(first, std::integral_constant<int, most>());
  if constexpr (most > 1) {
    if (first < count) over_tiles_of<most - 1>(count - first, [&](int64_t i, auto R) { f(first + i, R); });
  }
}

}  // namespace ttd::TTD_ISA
