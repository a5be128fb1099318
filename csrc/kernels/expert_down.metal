// W_d act of each chosen expert: weighted and summed in ascending choice, f32 [T, HIDDEN], or, where CONTRIBUTIONS,
// each by itself, f32 [T, CHOICES, HIDDEN]. A threadgroup takes SPAN * ROWS rows, each of its SIMD-groups one choice.
constexpr int SPAN = 32 / LANES;
constexpr int TILE = SPAN * ROWS;
TGMEM float parts[CHOICES][TILE];

const uint token = threadgroup_position_in_grid.y;
const uint choice = token * CHOICES + simdgroup_index_in_threadgroup;
const uint lane = thread_index_in_simdgroup % LANES;
const uint tile = threadgroup_position_in_grid.x * TILE;
const uint share = thread_index_in_simdgroup / LANES;
const int slot = slot_of[rows[choice]];
float c[ROWS];
for (int r = 0; r < ROWS; ++r) c[r] = 0.0f;
if (slot >= 0) {
  const device uchar* record = records + ulong(slot) * ulong(STRIDE);
  multiply_down<HIDDEN, INTER, BITS, GROUP, LANES>(
      c, (const device uint4*)(record + CODES), (const device S*)(record + SCALES), (const device S*)(record + BIASES),
      act + ulong(choice) * INTER, tile + share, lane);
}
#pragma unroll
for (int r = 0; r < ROWS; ++r) {
  if (lane == 0) parts[simdgroup_index_in_threadgroup][share + r * SPAN] = c[r];
}
threadgroup_barrier(mem_flags::mem_threadgroup);
const uint at = thread_position_in_threadgroup.x;
if (CONTRIBUTIONS) {
  for (uint i = at; i < TILE * CHOICES; i += CHOICES * 32) {
    const uint row = tile + i % TILE;
    if (row < HIDDEN) out[ulong(token * CHOICES + i / TILE) * HIDDEN + row] = parts[i / TILE][i % TILE];
  }
} else {
  for (uint i = at; i < TILE && tile + i < HIDDEN; i += CHOICES * 32) {
    float total = mul_rn(weights[token * CHOICES], parts[0][i]);
    for (int j = 1; j < CHOICES; ++j) total = add_rn(total, mul_rn(weights[token * CHOICES + j], parts[j][i]));
    out[ulong(token) * HIDDEN + tile + i] = total;
  }
}
