// Rows of activations times rows of 4-bit codes, both rounded to bf16 and summed in f32, on a processor with matrix
// tiles for bf16 (AMX): an option of prefill, for its speed. Two numbers of 8 bits err by at most 2^-8 each, so a sum is
// within (2^-7 + 2^-16 + columns 2^-24) times the sum of the products' magnitudes of the exact one; denormals are zeros.
#pragma once

#include "isa.h"
#include "multiply_floats.h"
#include "multiply_int4.h"
#include "multiply_tiles.h"
#include "sixteens.h"

namespace ttd::TTD_ISA {

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)

constexpr int tile_columns = 32, most_steps = 128 / tile_columns;  // of a tile, and tiles of a group at most
constexpr int most_tiles = 6;                                      // of tokens, which share a tile of weights

// Group g of at most sixteen rows of codes, as a tile for each 32 columns: words of two columns by row.
static inline void unpack_pairs(const Matrix& m, const uint8_t* codes, int rows, const float* scales, const float* biases, int64_t g,
                                int32_t* tiles) {
  const __m512 code = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i apart = _mm512_set1_epi32(0x000f000f);
  const int64_t groups = m.groups();
  const int steps = m.group / tile_columns;
  __m512i words[most_steps][16];
  for (int r = rows; r < 16; ++r)
    for (int step = 0; step < steps; ++step) words[step][r] = _mm512_setzero_si512();
  for (int r = 0; r < rows; ++r) {
    const __m512 scale = _mm512_set1_ps(scales[r * groups + g]), bias = _mm512_set1_ps(biases[r * groups + g]);
    const __m256bh numbers = _mm512_cvtneps_pbh(_mm512_fmadd_ps(code, scale, bias));
    const __m512i table = _mm512_castsi256_si512(reinterpret_cast<const __m256i&>(numbers));
    const uint8_t* from = codes + r * m.row_bytes() + g * steps * 16;
    read_ahead(from);
    for (int step = 0; step < steps; ++step) {
      const __m512i pair = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 16 * step)));
      const __m512i index = _mm512_and_si512(_mm512_or_si512(pair, _mm512_slli_epi32(pair, 12)), apart);
      words[step][r] = _mm512_permutexvar_epi16(index, table);
    }
  }
  for (int step = 0; step < steps; ++step) {
    transpose(words[step]);
    for (int i = 0; i < 16; ++i) _mm512_store_si512(tiles + 256 * step + 16 * i, words[step][i]);
  }
}

// A tile of sixteen rows of activations, `stride` bytes apart.
struct Tokens {
  const uint8_t* rows;
  int64_t stride;
};

// Sixteen laid-out rows where they lie if they are evenly apart, else, and where there are fewer, copied to `room`.
static inline Tokens tile_of(const uint8_t* const* x, int count, int64_t bytes, uint8_t* room) {
  bool even = count == 16;
  for (int t = 2; even && t < count; ++t) even = x[t] - x[t - 1] == x[1] - x[0];
  if (even && x[1] > x[0]) return {x[0], x[1] - x[0]};
  for (int t = 0; t < 16; ++t)
    if (t < count)
      std::memcpy(room + t * (bytes + 64), x[t], static_cast<size_t>(bytes));
    else
      std::memset(room + t * (bytes + 64), 0, static_cast<size_t>(bytes));
  return {room, bytes + 64};
}

// N tiles of tokens times at most sixteen rows from `codes` on: N * 16 rows of out [][block_rows].
template <int N>
static inline void multiply_pairs(const Matrix& m, const uint8_t* codes, int rows, const float* scales, const float* biases,
                                  const Tokens* x, float* out) {
  static_assert(N <= most_tiles && most_tiles == 6);
  alignas(64) int32_t tiles[2][most_steps * 256];
  const int64_t groups = m.groups(), steps = m.group / tile_columns;
#define TTD_EACH_TILE(f)                                                                                                   \
  f(0) if constexpr (N > 1) { f(1) } if constexpr (N > 2) { f(2) } if constexpr (N > 3) { f(3) } if constexpr (N > 4) { f(4) } \
  if constexpr (N > 5) { f(5) }
#define TTD_ZERO(i) _tile_zero(i);
#define TTD_ADD(i)                                                      \
  _tile_loadd(6, x[i].rows + 64 * (g * steps + step), x[i].stride);     \
  _tile_dpbf16ps(i, 6, 7);
#define TTD_STORE(i) _tile_stored(i, out + i * 16 * block_rows, block_rows * sizeof(float));
  TTD_EACH_TILE(TTD_ZERO)
  unpack_pairs(m, codes, rows, scales, biases, 0, tiles[0]);
  for (int64_t g = 0; g < groups; ++g) {
    if (g + 1 < groups) unpack_pairs(m, codes, rows, scales, biases, g + 1, tiles[(g + 1) % 2]);
    for (int64_t step = 0; step < steps; ++step) {
      _tile_loadd(7, tiles[g % 2] + 256 * step, 64);
      TTD_EACH_TILE(TTD_ADD)
    }
  }
  TTD_EACH_TILE(TTD_STORE)
#undef TTD_STORE
#undef TTD_ADD
#undef TTD_ZERO
#undef TTD_EACH_TILE
}

// `multiply` of a matrix whose products are rounded; x are rows of bf16.
static inline void multiply_bf16(const Matrix& m, int64_t first, int rows, const uint8_t* const* x, int tokens, float* out) {
  const TileRegisters registers;
  const int64_t bytes = 2 * m.cols;
  uint8_t* room = scratch<uint8_t>(Scratch::tiles, block_tokens * (bytes + 64));
  const WideScales wide(m, first, rows);
  Tokens tiles[block_tokens / 16];
  for (int t = 0; t < tokens; t += 16) tiles[t / 16] = tile_of(x + t, tokens - t < 16 ? tokens - t : 16, bytes, room + t * (bytes + 64));
  for (int row = 0; row < rows; row += 16) {
    const auto* codes = static_cast<const uint8_t*>(m.codes) + (first + row) * m.row_bytes();
    const int some = rows - row < 16 ? rows - row : 16;
    over_tiles_of<most_tiles>(tiles_of(tokens), [&](int64_t tile, auto N) {
      multiply_pairs<N>(m, codes, some, wide.scale(row), wide.bias(row), tiles + tile, out + tile * 16 * block_rows + row);
    });
  }
}

#else

static inline void multiply_bf16(const Matrix&, int64_t, int, const uint8_t* const*, int, float*) {}

#endif

}  // namespace ttd::TTD_ISA
