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

// Products of the same x, at most `most_together`, side by side.
constexpr int most_together = 4;
void linear_all(const Linear* calls, int count);

}  // namespace ttd

#ifdef TTD_OPERATIONS
#include "multiply.h"
#include "multiply_tiles.h"

namespace ttd::TTD_ISA {

// Rows of x as `multiply` reads them, and as tiles where this product runs on those.
struct LaidOutRows {
  const uint8_t** rows;
  TileGroup* tiles;
};

static inline bool on_tiles(const Linear& call) { return call.prefill && tiled(call.matrix); }

static inline bool laid_out_alike(const Linear& a, const Linear& b) {
  const Matrix &m = a.matrix, &n = b.matrix;
  if (m.format == Format::int4 || n.format == Format::int4)
    return m.format == n.format && m.group == n.group && m.rounded == n.rounded && on_tiles(a) == on_tiles(b);
  return true;
}

// Blocks of rows in a product's window, and how many of them one chunk of work takes: several where there are many.
static inline int64_t blocks_of(const Linear& call) { return (call.stop - call.start + block_rows - 1) / block_rows; }
static inline int64_t chunk_blocks(const Linear& call) { return blocks_of(call) > 2048 ? 8 : 1; }

static inline void lay_out_rows(const Linear& call, int64_t first, int tokens, uint8_t* rows, const LaidOutRows& to) {
  const Matrix& m = call.matrix;
  const int64_t size = row_size(m);
  parallel_for(tokens, [&](int64_t t) {
    to.rows[t] = rows + t * size;
    with_type(call.x_type, [&](auto* kind) {
      const auto* from = static_cast<decltype(kind)>(const_cast<void*>(call.x));
      lay_out(m, from + (first + t) * m.cols, rows + t * size);
    });
  });
  if (to.tiles == nullptr) return;
  parallel_for(tiles_of(tokens), [&](int64_t i) {
    const int some = tokens - 16 * i < 16 ? static_cast<int>(tokens - 16 * i) : 16;
    lay_out_tile(m, to.rows + 16 * i, some, to.tiles + i * tile_groups(m));
  });
}

// Rows [first, first + some) of a product's window for `tokens` rows of x from `token` on.
static inline void multiply_block(const Linear& call, const LaidOutRows& x, int64_t token, int tokens, int64_t first, int some) {
  float* products = scratch<float>(Scratch::products, block_tokens * block_rows);
  const int64_t width = call.stop - call.start;
  if (x.tiles == nullptr)
    multiply(call.matrix, call.start + first, some, x.rows, tokens, products);
  else
    multiply_tiles(call.matrix, call.start + first, some, x.tiles, tokens, products);
  with_type(call.out_type, [&](auto* kind) {
    auto* out = static_cast<decltype(kind)>(call.out) + token * width + first;
    for (int t = 0; t < tokens; ++t)
      for (int r = 0; r < some; r += 16) {
        const Floats value = load(products + t * block_rows + r);
        if (some - r >= 16)
          store(out + t * width + r, value);
        else
          store_some(out + t * width + r, value, some - r);
      }
  });
}

static void linear_all(const Linear* calls, int count) {
  const FloatMode mode(Denormals::kept);
  LaidOutRows x[most_together];
  uint8_t* rows[most_together];
  int alike[most_together];  // the first call whose x is laid out as this one's
  int64_t row_bytes = 0, tile_groups_all = 0, chunks[most_together + 1] = {};
  for (int i = 0; i < count; ++i) {
    const Linear& call = calls[i];
    alike[i] = 0;
    while (alike[i] < i && !laid_out_alike(call, calls[alike[i]])) ++alike[i];
    chunks[i + 1] = chunks[i] + (blocks_of(call) + chunk_blocks(call) - 1) / chunk_blocks(call);
    if (alike[i] != i) continue;
    row_bytes += block_tokens * row_size(call.matrix);
    if (on_tiles(call)) tile_groups_all += tiles_of(block_tokens) * tile_groups(call.matrix);
  }
  uint8_t* bytes = scratch<uint8_t>(Scratch::inputs, row_bytes);
  const uint8_t** pointers = scratch<const uint8_t*>(Scratch::pointers, most_together * block_tokens);
  TileGroup* tiles = tile_groups_all > 0 ? scratch<TileGroup>(Scratch::tiles, tile_groups_all) : nullptr;
  for (int i = 0; i < count; ++i) {
    const Matrix& m = calls[i].matrix;
    rows[i] = bytes;
    if (alike[i] != i) {
      x[i] = x[alike[i]];
      continue;
    }
    x[i] = {pointers + i * block_tokens, on_tiles(calls[i]) ? tiles : nullptr};
    bytes += block_tokens * row_size(m);
    if (on_tiles(calls[i])) tiles += tiles_of(block_tokens) * tile_groups(m);
  }
  const int64_t all = calls[0].tokens;
  for (int64_t token = 0; token < all; token += block_tokens) {
    const int tokens = static_cast<int>(all - token < block_tokens ? all - token : block_tokens);
    for (int i = 0; i < count; ++i)
      if (alike[i] == i) lay_out_rows(calls[i], token, tokens, rows[i], x[i]);
    parallel_for(chunks[count], [&](int64_t chunk) {
      int i = 0;
      while (chunk >= chunks[i + 1]) ++i;
      const int64_t width = calls[i].stop - calls[i].start, together = chunk_blocks(calls[i]), from = (chunk - chunks[i]) * together;
      for (int64_t block = from; block < blocks_of(calls[i]) && block < from + together; ++block) {
        const int64_t first = block * block_rows;
        multiply_block(calls[i], x[i], token, tokens, first, static_cast<int>(width - first < block_rows ? width - first : block_rows));
      }
    });
  }
}

}  // namespace ttd::TTD_ISA
#endif
