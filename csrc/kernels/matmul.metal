// x [T, COLS] times w [N, COLS] transposed: [T, N] of type O, in tiles of TILE x 64, for prefill.
TGMEM Tile<TILE, BITS, GROUP> tile;
TGMEM uint source[TILE];
const uint index = thread_position_in_threadgroup.x;
const uint tokens = x_shape[0], rows = w_shape[0];
const uint first = threadgroup_position_in_grid.y * TILE;
if (index < TILE) source[index] = first + index < tokens ? first + index : tokens - 1;
threadgroup_barrier(mem_flags::mem_threadgroup);
Columns columns;
columns.low = threadgroup_position_in_grid.x * 64;
columns.low_end = rows;
columns.high = columns.low + 32;
columns.high_end = rows;
float sums[TILE / 8][4];
for (int i = 0; i < TILE / 8; ++i) {
  for (int j = 0; j < 4; ++j) sums[i][j] = 0.0f;
}
accumulate_tile<TILE, COLS, BITS, GROUP, W>(sums, x, source, (const device uint4*)w, scales, biases, columns, tile,
                                            index);
for (int i = 0; i < TILE / 8; ++i) {
  const uint row = first + index / 16 * (TILE / 8) + i;
  for (uint j = 0; j < 4; ++j) {
    const uint column = columns.low + index % 16 * 2 + j % 2 + j / 2 * 32;
    if (row < tokens && column < rows) out[ulong(row) * rows + column] = O(sums[i][j]);
  }
}
