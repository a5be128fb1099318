// The number types that operations read and write.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ttd {

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

enum class Type { f32, bf16, f16 };

inline size_t size_of(Type type) { return type == Type::f32 ? 4 : 2; }

// Calls f with a null pointer to the element type.
template <class F>
static inline void with_type(Type type, F&& f) {
  if (type == Type::f32) f(static_cast<float*>(nullptr));
  if (type == Type::bf16) f(static_cast<bf16*>(nullptr));
  if (type == Type::f16) f(static_cast<f16*>(nullptr));
}

}  // namespace ttd
