// Dense projections and the head: rows of activations times a window of rows of a stored matrix.
#pragma once

#include "matrix.h"

namespace ttd {

struct Linear {
  Matrix matrix;
  int64_t start, stop;  // the window of the matrix's rows
  int64_t tokens;
  Type x_type;
  const void* x;  // [tokens, cols]
  Type out_type;
  void* out;  // [tokens, stop - start]
  bool prefill = false;
};

void linear(const Linear& call);

}  // namespace ttd

#ifdef TTD_OPERATIONS
#include "multiply.h"
#include "multiply_tiles.h"

namespace ttd::TTD_ISA {

// Lays out `tokens` rows of x and returns where each lies.
static inline const uint8_t* const* lay_out_rows(const Matrix& m, const void* x, Type type, int64_t first, int tokens) {
  const int64_t size = row_size(m);
  uint8_t* rows = scratch<uint8_t>(Scratch::inputs, tokens * size);
  const uint8_t** at = scratch<const uint8_t*>(Scratch::pointers, tokens);
  parallel_for(tokens, [&](int64_t t) {
    at[t] = rows + t * size;
    with_type(type, [&](auto* kind) {
      const auto* from = static_cast<decltype(kind)>(const_cast<void*>(x));
      lay_out(m, from + (first + t) * m.cols, rows + t * size);
    });
  });
  return at;
}

// The rows that lay_out_rows laid out as tiles, or null where this product does not run on tiles.
static inline const TileGroup* lay_out_tiles(const Linear& call, const uint8_t* const* x, int tokens) {
  const Matrix& m = call.matrix;
  if (!call.prefill || !tiled(m)) return nullptr;
  TileGroup* tiles = scratch<TileGroup>(Scratch::tiles, tiles_of(tokens) * tile_groups(m));
  parallel_for(tiles_of(tokens), [&](int64_t i) {
    const int some = tokens - 16 * i < 16 ? static_cast<int>(tokens - 16 * i) : 16;
    lay_out_tile(m, x + 16 * i, some, tiles + i * tile_groups(m));
  });
  return tiles;
}

static void linear(const Linear& call) {
  const FloatMode mode(Denormals::kept);
  const Matrix& m = call.matrix;
  const int64_t rows = call.stop - call.start;
  const int64_t blocks_per_chunk = rows > 65536 ? 8 : 1;
  const int64_t blocks = (rows + block_rows - 1) / block_rows;
  for (int64_t token = 0; token < call.tokens; token += block_tokens) {
    const int count = static_cast<int>(call.tokens - token < block_tokens ? call.tokens - token : block_tokens);
    const uint8_t* const* x = lay_out_rows(m, call.x, call.x_type, token, count);
    const TileGroup* tiles = lay_out_tiles(call, x, count);
    parallel_for((blocks + blocks_per_chunk - 1) / blocks_per_chunk, [&](int64_t chunk) {
      float* products = scratch<float>(Scratch::products, block_tokens * block_rows);
      for (int64_t block = chunk * blocks_per_chunk; block < blocks && block < (chunk + 1) * blocks_per_chunk; ++block) {
        const int64_t first = block * block_rows;
        const int some = static_cast<int>(rows - first < block_rows ? rows - first : block_rows);
        if (tiles == nullptr)
          multiply(m, call.start + first, some, x, count, products);
        else
          multiply_tiles(m, call.start + first, some, tiles, count, products);
        with_type(call.out_type, [&](auto* kind) {
          auto* out = static_cast<decltype(kind)>(call.out) + token * rows + first;
          for (int t = 0; t < count; ++t)
            for (int r = 0; r < some; r += 16) {
              const Floats value = load(products + t * block_rows + r);
              if (some - r >= 16)
                store(out + t * rows + r, value);
              else
                store_some(out + t * rows + r, value, some - r);
            }
        });
      }
    });
  }
}

}  // namespace ttd::TTD_ISA
#endif
