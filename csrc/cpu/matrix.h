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
  bool rounded = false;  // whether 4-bit weights and activations are multiplied as bf16 (multiply_bf16.h)

  int64_t groups() const { return cols / group; }
  int64_t steps() const { return (cols + 15) / 16; }  // of sixteen lanes in a row
  int64_t row_bytes() const {
    if (format == Format::plain) return cols * static_cast<int64_t>(size_of(type));
    return format == Format::int4 ? cols / 2 : cols;
  }
};

}  // namespace ttd
