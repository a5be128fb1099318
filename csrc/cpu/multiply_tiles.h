// Many rows of activations times rows of 4-bit codes in groups of 64, sixteen by sixteen, on a processor with matrix
// tiles (AMX). The integers are those of multiply_int4.h, but summed over a whole group before they become floats: other
// roundings, so prefill alone runs so. Experts do not: few tokens share one, and a tile costs the same for one as for
// sixteen.
#pragma once

#include "isa.h"
#include "multiply_floats.h"
#include "multiply_int4.h"

namespace ttd::TTD_ISA {

constexpr int tile_group = 64;

// Sixteen tokens' activations of one group: for each of three bytes, words of four columns by token; the sums of columns.
struct alignas(64) TileGroup {
  int32_t words[3][16][16];
  float sums[16];
};

static inline int64_t tiles_of(int64_t tokens) { return (tokens + 15) / 16; }

#if defined(__AMX_INT8__)

static inline bool tiled(const Matrix& m) { return m.format == Format::int4 && !m.rounded && m.group == tile_group && isa() == Isa::amx; }

// Groups of one tile of tokens, then one more that holds the tokens' units in its sums.
static inline int64_t tile_groups(const Matrix& m) { return m.groups() + 1; }

static inline void transpose(__m512i* rows) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      rows[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
      rows[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
  for (int j = 0; j < 4; ++j) {
    t[j] = _mm512_shuffle_i32x4(rows[j], rows[4 + j], 0x88);
    t[4 + j] = _mm512_shuffle_i32x4(rows[j], rows[4 + j], 0xdd);
    t[8 + j] = _mm512_shuffle_i32x4(rows[8 + j], rows[12 + j], 0x88);
    t[12 + j] = _mm512_shuffle_i32x4(rows[8 + j], rows[12 + j], 0xdd);
  }
  for (int j = 0; j < 4; ++j) {
    rows[j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0x88);
    rows[8 + j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0xdd);
    rows[4 + j] = _mm512_shuffle_i32x4(t[4 + j], t[12 + j], 0x88);
    rows[12 + j] = _mm512_shuffle_i32x4(t[4 + j], t[12 + j], 0xdd);
  }
}

// At most sixteen laid-out rows as one tile of tokens.
static inline void lay_out_tile(const Matrix& m, const uint8_t* const* x, int tokens, TileGroup* out) {
  FixedRow rows[16];
  for (int t = 0; t < tokens; ++t) rows[t] = fixed_row(m, x[t]);
  for (int64_t g = 0; g < m.groups(); ++g, ++out) {
    for (int limb = 0; limb < 3; ++limb) {
      __m512i words[16];
      for (int t = 0; t < 16; ++t) {
        words[t] = _mm512_setzero_si512();
        if (t < tokens) {
          const FixedBlock& block = rows[t].blocks[g / 2];
          const int from = g % 2 * 32;
          words[t] = _mm512_inserti64x4(
              _mm512_castsi256_si512(_mm256_load_si256(reinterpret_cast<const __m256i*>(block.even[limb] + from))),
              _mm256_load_si256(reinterpret_cast<const __m256i*>(block.odd[limb] + from)), 1);
        }
      }
      transpose(words);
      for (int i = 0; i < 16; ++i) _mm512_store_si512(out->words[limb][i], words[i]);
    }
    for (int t = 0; t < 16; ++t) out->sums[t] = t < tokens ? rows[t].sums[g] : 0.0f;
  }
  for (int t = 0; t < 16; ++t) out->sums[t] = t < tokens ? rows[t].unit : 0.0f;
}

// This thread's tile registers, for as long as the object lives: eight of sixteen rows of 64 bytes.
class TileRegisters {
 public:
  TileRegisters() {
    struct alignas(64) Shape {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t columns[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } shape;
    _tile_loadconfig(&shape);
  }
  ~TileRegisters() { _tile_release(); }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
};

// Sixteen rows' codes of one group by sixteen tokens, a product for each byte of the activations.
static inline void multiply_group(const uint8_t* codes, const TileGroup& x, int32_t* products) {
  _tile_loadd(0, codes, 64);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_loadd(4, x.words[0], 64);
  _tile_loadd(5, x.words[1], 64);
  _tile_loadd(6, x.words[2], 64);
  _tile_dpbusd(1, 0, 4);
  _tile_dpbusd(2, 0, 5);
  _tile_dpbusd(3, 0, 6);
  _tile_stored(1, products, 64);
  _tile_stored(2, products + 256, 64);
  _tile_stored(3, products + 512, 64);
}

// Codes of rows [first, first + rows), at most sixteen, a byte each: a group's low halves of bytes, then its high ones.
static inline void unpack_codes(const Matrix& m, int64_t first, int rows, uint8_t* out) {
  const __m256i mask = _mm256_set1_epi8(15);
  for (int r = 0; r < rows; ++r) {
    const auto* from = static_cast<const uint8_t*>(m.codes) + (first + r) * m.row_bytes();
    for (int64_t g = 0; g < m.groups(); ++g) {
      read_ahead(from + 32 * g);
      const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 32 * g));
      auto* to = reinterpret_cast<__m256i*>(out + 1024 * g + 64 * r);
      _mm256_store_si256(to, _mm256_and_si256(bytes, mask));
      _mm256_store_si256(to + 1, _mm256_and_si256(_mm256_srli_epi32(bytes, 4), mask));
    }
  }
}

// `multiply` from tiles of tokens.
static inline void multiply_tiles(const Matrix& m, int64_t first, int rows, const TileGroup* tiles, int tokens, float* out) {
  const TileRegisters registers;
  const int64_t groups = m.groups();
  uint8_t* codes = scratch<uint8_t>(Scratch::panel, 1024 * groups);
  alignas(64) int32_t products[2][768];
  const WideScales wide(m, first, rows);
  for (int row = 0; row < rows; row += 16) {
    const int some = rows - row < 16 ? rows - row : 16;
    unpack_codes(m, first + row, some, codes);
    for (int64_t tile = 0; tile < tiles_of(tokens); ++tile) {
      const TileGroup* x = tiles + tile * tile_groups(m);
      __m512 total[16];
      for (auto& lane : total) lane = _mm512_setzero_ps();
      multiply_group(codes, x[0], products[0]);
      for (int64_t g = 0; g < groups; ++g) {
        if (g + 1 < groups) multiply_group(codes + 1024 * (g + 1), x[g + 1], products[(g + 1) % 2]);
        const int32_t* product = products[g % 2];
        const __m512 sums = _mm512_load_ps(x[g].sums);
        const float *scale = wide.scale(row) + g, *bias = wide.bias(row) + g;
#pragma GCC unroll 16
        for (int r = 0; r < 16 && r < some; ++r, product += 16, scale += groups, bias += groups) {
          const __m512i high = _mm512_add_epi32(_mm512_slli_epi32(_mm512_load_si512(product), 8),
                                                _mm512_load_si512(product + 256));
          const __m512 low = _mm512_cvtepi32_ps(_mm512_load_si512(product + 512));
          const __m512 whole = _mm512_fmadd_ps(_mm512_cvtepi32_ps(high), _mm512_set1_ps(256.0f), low);
          total[r] = _mm512_fmadd_ps(whole, _mm512_set1_ps(*scale), total[r]);
          total[r] = _mm512_fmadd_ps(sums, _mm512_set1_ps(*bias), total[r]);
        }
      }
      const __m512 units = _mm512_load_ps(x[groups].sums);
      __m512i words[16];
      for (int r = 0; r < 16; ++r) words[r] = _mm512_castps_si512(_mm512_mul_ps(total[r], units));
      transpose(words);
      const int here = tokens - 16 * tile < 16 ? static_cast<int>(tokens - 16 * tile) : 16;
      for (int t = 0; t < here; ++t) _mm512_storeu_si512(out + (16 * tile + t) * block_rows + row, words[t]);
    }
  }
}

#else

static inline bool tiled(const Matrix&) { return false; }
static inline int64_t tile_groups(const Matrix&) { return 0; }
static inline void lay_out_tile(const Matrix&, const uint8_t* const*, int, TileGroup*) {}
static inline void multiply_tiles(const Matrix&, int64_t, int, const TileGroup*, int, float*) {}

#endif

}  // namespace ttd::TTD_ISA
