// A stored matrix [rows, cols] that rows of activations are multiplied by.
#pragma once

#include <cstddef>
#include <cstdint>

#include "numbers.h"

namespace ttd {

// Affine codes (w = q * scale + bias) of 4 or 8 bits, or plain numbers.
enum class Format { int4, int8, plain };

struct Matrix {
  Format format = Format::plain;
  Type type = Type::f32;  // of the numbers, or of scales and biases
  int group = 16;         // columns that share a scale: 32, 64 or 128
  int64_t rows = 0, cols = 0;
  const void* codes = nullptr;  // [rows, cols] numbers, or the packed codes, low bits first
  const void* scales = nullptr;  // [rows, cols / group]
  const void* biases = nullptr;

  int64_t groups() const { return cols / group; }
  int64_t steps() const { return (cols + 15) / 16; }  // of sixteen lanes in a row
  int64_t row_bytes() const {
    if (format == Format::plain) return cols * static_cast<int64_t>(size_of(type));
    return format == Format::int4 ? cols / 2 : cols;
  }
};

// Where column i of a row lies once laid out for multiplication. Codes of 4 bits come apart by nibble: sixteen lanes
// hold one nibble (or, in groups under 128, two or four) of each of a group's 32-bit words.
inline int64_t position(const Matrix& m, int64_t i) {
  if (m.format != Format::int4) return i;
  const int64_t group = i / m.group, in_group = i % m.group;
  const int64_t words = m.group / 8, steps = m.group / 16;
  const int64_t word = in_group / 8, nibble = in_group % 8;
  return group * m.group + nibble % steps * 16 + nibble / steps * words + word;
}

}  // namespace ttd
