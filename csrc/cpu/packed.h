// Sixteen weights at a time out of a stored row, as the floats they stand for. `Group` is what is loaded once a group.
#pragma once

#include "matrix.h"
#include "simd.h"

namespace ttd::TTD_ISA {

// Numbers as they are: a group is one step of sixteen.
template <class T>
struct Plain {
  static constexpr bool plain = true;
  static constexpr int steps = 1;
  using Group = const T*;
  static inline Group group(const uint8_t* row, int64_t g, float, float) {
    return reinterpret_cast<const T*>(row) + g * 16;
  }
  template <int step>
  static inline Floats weight(Group at) {
    return load(at);
  }
};

template <int group_size>
struct Int8 {
  static constexpr bool plain = false;
  static constexpr int steps = group_size / 16;
  struct Group {
    const uint8_t* codes;
    Floats scale, bias;
  };
  static inline Group group(const uint8_t* row, int64_t g, float scale, float bias) {
    return {row + g * group_size, splat(scale), splat(bias)};
  }
  template <int step>
  static inline Floats weight(const Group& g) {
    return fma(load(g.codes + 16 * step), g.scale, g.bias);
  }
};

template <int group_size>
struct Int4 {
  static constexpr bool plain = false;
  static constexpr int steps = group_size / 16;
  struct Group {
    Nibbles<steps> codes;
    Levels levels;
  };
  static inline Group group(const uint8_t* row, int64_t g, float scale, float bias) {
    return {nibbles<steps>(row + g * (group_size / 2)), levels(scale, bias)};
  }
  template <int step>
  static inline Floats weight(const Group& g) {
    return g.levels.template at<steps, step>(g.codes);
  }
};

}  // namespace ttd::TTD_ISA
