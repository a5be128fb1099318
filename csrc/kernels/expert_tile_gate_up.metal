// silu(W_g x) * (W_u x) for the choices of one tile (expert_plan.metal) and 32 of the INTER channels: f32
// [T * CHOICES, INTER], by choice.
TGMEM Tile<TILE, BITS, GROUP> tile;
TGMEM uint source[TILE], choice[TILE];
const uint index = thread_position_in_threadgroup.x;
const uint at = threadgroup_position_in_grid.y * 3;
const int first = tiles[at + 1], end = tiles[at + 2];
if (first == end) return;
if (index < TILE) {
  const int here = first + int(index) < end ? first + int(index) : end - 1;
  choice[index] = order[here];
  source[index] = order[here] / CHOICES;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
const device uchar* record = records + ulong(slot_of[tiles[at]]) * ulong(STRIDE);
Columns columns;
columns.low = threadgroup_position_in_grid.x * 32;
columns.low_end = INTER;
columns.high = INTER + columns.low;
columns.high_end = 2 * INTER;
float sums[TILE / 8][4];
for (int i = 0; i < TILE / 8; ++i) {
  for (int j = 0; j < 4; ++j) sums[i][j] = 0.0f;
}
accumulate_tile<TILE, HIDDEN, BITS, GROUP, uint>(
    sums, x, source, (const device uint4*)(record + CODES), (const device S*)(record + SCALES),
    (const device S*)(record + BIASES), columns, tile, index);
for (int i = 0; i < TILE / 8; ++i) {
  const uint row = index / 16 * (TILE / 8) + i;
  for (uint j = 0; j < 2; ++j) {
    const uint channel = columns.low + index % 16 * 2 + j;
    if (first + int(row) < end && channel < INTER) {
      act[ulong(choice[row]) * INTER + channel] = swiglu(sums[i][j], sums[i][2 + j]);
    }
  }
}
