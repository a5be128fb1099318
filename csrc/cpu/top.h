// The greatest of many numbers, in order, the lower index first of equals.
#pragma once

#include <cstdint>

namespace ttd {

struct Top {
  int64_t size;
  const float* numbers;  // [size]
  int64_t count;         // from 1 to size
  int32_t* ids;          // [count]
};

void top(const Top& call);

}  // namespace ttd

#ifdef TTD_OPERATIONS
#include <algorithm>
#include <functional>

#include "pool.h"
#include "sixteens.h"

namespace ttd::TTD_ISA {

constexpr int64_t part_numbers = 32768, near_numbers = 64;

// Integers in the order of floats, -0 as 0.
static inline int32_t order_of(float number) {
  const float unsigned_zero = number + 0.0f;
  int32_t bits;
  std::memcpy(&bits, &unsigned_zero, 4);
  return bits ^ (bits >> 31 & 0x7fffffff);
}

// (order, -id): no two are equal.
static inline int64_t rank_of(float number, int64_t id) { return int64_t{order_of(number)} * (int64_t{1} << 32) + (0xffffffff - id); }

// The `count` greatest ranks of numbers [first, last) as a heap, the least of them in front; returns how many there are.
static inline int64_t best_of(const Top& call, int64_t first, int64_t last, int64_t* heap) {
  int64_t size = 0;
  for (int64_t near = first; near < last; near += near_numbers) {
    const int64_t stop = smaller(near + near_numbers, last);
    if (size == call.count) {
      int32_t most = INT32_MIN;
      for (int64_t i = near; i < stop; ++i) most = std::max(most, order_of(call.numbers[i]));
      if (most <= heap[0] >> 32) continue;
    }
    for (int64_t i = near; i < stop; ++i) {
      const int64_t rank = rank_of(call.numbers[i], i);
      if (size == call.count) {
        if (rank < heap[0]) continue;
        std::pop_heap(heap, heap + size--, std::greater<>());
      }
      heap[size++] = rank;
      std::push_heap(heap, heap + size, std::greater<>());
    }
  }
  return size;
}

static void top(const Top& call) {
  const FloatMode mode(Denormals::kept);
  const int64_t parts = (call.size + part_numbers - 1) / part_numbers;
  int64_t* best = scratch<int64_t>(Scratch::products, parts * call.count);
  int64_t* found = scratch<int64_t>(Scratch::counts, parts);
  parallel_for(parts, [&](int64_t part) {
    const int64_t first = part * part_numbers;
    found[part] = best_of(call, first, smaller(first + part_numbers, call.size), best + part * call.count);
  });
  int64_t all = 0;
  for (int64_t part = 0; part < parts; ++part)
    for (int64_t i = 0; i < found[part]; ++i) best[all++] = best[part * call.count + i];
  std::partial_sort(best, best + call.count, best + all, std::greater<>());
  for (int64_t i = 0; i < call.count; ++i) call.ids[i] = static_cast<int32_t>(0xffffffff - (best[i] & 0xffffffff));
}

}  // namespace ttd::TTD_ISA
#endif
