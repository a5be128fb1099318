// Sixteen weights at a time out of a stored row, as the floats they stand for. `Group` is what is loaded once a group.
#pragma once

#include "matrix.h"
#include "simd.h"

namespace ttd::TTD_ISA {

// Numbers as they are: a group is one step of sixteen.
template <class T>
struct Plain {
  static constexpr bool scaled = false;
  static constexpr int steps = 1;
  using Group = const T*;
  static inline Group group(const uint8_t* row, int64_t g, const float*, const float*) {
    return reinterpret_cast<const T*>(row) + g * 16;
  }
  template <int step>
  static inline Floats weight(Group at) {
    return load(at);
  }
};

// Codes of 8 bits: a weight is fma(code, scale, bias).
template <int group_size>
struct Int8 {
  static constexpr bool scaled = true;
  static constexpr int steps = group_size / 16;
  struct Group {
    const uint8_t* codes;
    Floats scale, bias;
  };
  static inline Group group(const uint8_t* row, int64_t g, const float* scales, const float* biases) {
    const uint8_t* codes = row + g * group_size;
    read_ahead(codes);
    return {codes, splat(scales[g]), splat(biases[g])};
  }
  template <int step>
  static inline Floats weight(const Group& g) {
    return fma(load(g.codes + 16 * step), g.scale, g.bias);
  }
};

template <class F>
static inline void with_codes(const Matrix& m, F&& f) {
  if (m.format == Format::plain) {
    with_type(m.type, [&](auto* type) { f(Plain<std::remove_pointer_t<decltype(type)>>()); });
  } else {
    if (m.group == 32) f(Int8<32>());
    if (m.group == 64) f(Int8<64>());
    if (m.group == 128) f(Int8<128>());
  }
}

}  // namespace ttd::TTD_ISA
