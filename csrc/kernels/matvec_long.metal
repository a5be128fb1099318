// As matvec.metal, bit for bit, for so many rows that threadgroups take TILE of them again and again. A step's loads are
// under way while the step before is multiplied.
constexpr int CHUNKS = COLS * BITS / 128;
constexpr int STEPS = CHUNKS / LANES;
constexpr int SPAN = 32 / LANES;
constexpr uint TILE = SIMDS * SPAN * ROWS;
TGMEM float4 staged[(CHUNKS + 1) * (32 / BITS)];
TGMEM float sums[CHUNKS];

const uint rows = w_shape[0];
const uint token = threadgroup_position_in_grid.y;
const uint lane = thread_index_in_simdgroup % LANES;
const uint mine = simdgroup_index_in_threadgroup * SPAN * ROWS + thread_index_in_simdgroup / LANES;
const uint apart = threadgroups_per_grid.x * TILE;
// The last rows are taken in a whole tile, which begins among those of the one before.
const uint end = rows - TILE;
const uint begin = threadgroup_position_in_grid.x * TILE;
Row<1> row[2][ROWS];
read_rows<COLS, BITS, GROUP, LANES>(row[0], (const device uint4*)w, scales, biases, (begin < end ? begin : end) + mine,
                                    lane);
stage<COLS, BITS, SIMDS * 32>(x + ulong(token) * COLS, staged, sums,
                              simdgroup_index_in_threadgroup * 32 + thread_index_in_simdgroup);
threadgroup_barrier(mem_flags::mem_threadgroup);
for (uint tile = begin; tile < rows; tile += apart) {
  const uint first = (tile < end ? tile : end) + mine;
  const uint next = (tile + apart < end ? tile + apart : end) + mine;
  float total[ROWS];
  for (int r = 0; r < ROWS; ++r) total[r] = 0.0f;
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    const bool last = step + 1 == STEPS;
    read_rows<COLS, BITS, GROUP, LANES>(row[(step + 1) % 2], (const device uint4*)w, scales, biases,
                                        last ? next : first, last ? lane : lane + (step + 1) * LANES);
    hold_loads();
    Chunk<BITS> chunk;
    read_staged<BITS, CHUNKS>(chunk, staged, sums, lane + step * LANES);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) total[r] = add_chunk<BITS, GROUP, W>(row[step % 2][r], 0, chunk, total[r]);
  }
  if (STEPS % 2 == 1) {
    for (int r = 0; r < ROWS; ++r) row[0][r] = row[1][r];
  }
  const float value = rows_sum<LANES, ROWS>(total, lane);
  const uint index = first + lane * SPAN;
  if (lane < ROWS && index >= tile) out[ulong(token) * rows + index] = O(value);
}
