// W_d act for the choices of one tile (expert_plan.metal) and 64 of the WINDOW channels from window[0] on: f32
// [T * CHOICES, WINDOW], by choice.
TGMEM Tile<TILE, BITS, GROUP> tile;
TGMEM uint source[TILE];
const uint index = thread_position_in_threadgroup.x;
const uint at = threadgroup_position_in_grid.y * 3;
const int first = tiles[at + 1], end = tiles[at + 2];
if (first == end) return;
if (index < TILE) source[index] = order[first + int(index) < end ? first + int(index) : end - 1];
threadgroup_barrier(mem_flags::mem_threadgroup);
const device uchar* record = records + ulong(slot_of[tiles[at]]) * ulong(STRIDE);
const uint begin = window[0];
const uint channel = threadgroup_position_in_grid.x * 64;
Columns columns;
columns.low = begin + channel;
columns.low_end = HIDDEN;
columns.high = columns.low + 32;
columns.high_end = HIDDEN;
float sums[TILE / 8][4];
for (int i = 0; i < TILE / 8; ++i) {
  for (int j = 0; j < 4; ++j) sums[i][j] = 0.0f;
}
accumulate_tile<TILE, INTER, BITS, GROUP, uint>(
    sums, act, source, (const device uint4*)(record + CODES), (const device S*)(record + SCALES),
    (const device S*)(record + BIASES), columns, tile, index);
for (int i = 0; i < TILE / 8; ++i) {
  const uint row = index / 16 * (TILE / 8) + i;
  for (uint j = 0; j < 4; ++j) {
    const uint here = channel + index % 16 * 2 + j % 2 + j / 2 * 32;
    if (first + int(row) < end && here < WINDOW) out[ulong(source[row]) * WINDOW + here] = sums[i][j];
  }
}
