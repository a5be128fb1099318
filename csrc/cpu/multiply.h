// Rows of activations times a block of rows of a stored matrix. Every output is one sum of sixteen lanes along the
// columns in one fixed order, whatever the number of rows: a row's result has the same bits alone and among many.
#pragma once

#include "multiply_bf16.h"
#include "multiply_floats.h"
#include "multiply_int4.h"

namespace ttd::TTD_ISA {

// Rows [first, first + rows) of m, at most block_rows, times `tokens` rows x[t] from `lay_out`, at most block_tokens:
// out [tokens][block_rows].
static inline void multiply(const Matrix& m, int64_t first, int rows, const uint8_t* const* x, int tokens, float* out) {
  if (m.rounded) return multiply_bf16(m, first, rows, x, tokens, out);
  if (m.format != Format::int4)
    return with_codes(m, [&]<class Codes>(Codes) { multiply_floats<Codes>(m, first, rows, x, tokens, out); });
  with_type(m.type, [&](auto* type) {
    using S = std::remove_pointer_t<decltype(type)>;
    if (m.group == 32) multiply_int4<32, S>(m, first, rows, x, tokens, out);
    if (m.group == 64) multiply_int4<64, S>(m, first, rows, x, tokens, out);
    if (m.group == 128) multiply_int4<128, S>(m, first, rows, x, tokens, out);
  });
}

}  // namespace ttd::TTD_ISA
