// As matvec.metal, bit for bit, for so many rows that threadgroups take SIMDS * SPAN * ROWS of them again and again.
// One step's loads at a time keep registers few, and other SIMD-groups busy while they come.
constexpr int CHUNKS = COLS * BITS / 128;
constexpr int STEPS = CHUNKS / LANES;
constexpr int SPAN = 32 / LANES;
constexpr int TILE = SIMDS * SPAN * ROWS;
TGMEM float4 staged[(CHUNKS + 1) * (32 / BITS)];
TGMEM float sums[CHUNKS];

const uint rows = w_shape[0];
const uint token = threadgroup_position_in_grid.y;
const uint lane = thread_index_in_simdgroup % LANES;
stage<COLS, BITS, SIMDS * 32>(x + ulong(token) * COLS, staged, sums,
                              simdgroup_index_in_threadgroup * 32 + thread_index_in_simdgroup);
threadgroup_barrier(mem_flags::mem_threadgroup);
for (uint tile = threadgroup_position_in_grid.x * TILE; tile < rows; tile += threadgroups_per_grid.x * TILE) {
  const uint first = tile + simdgroup_index_in_threadgroup * SPAN * ROWS + thread_index_in_simdgroup / LANES;
  float total[ROWS];
  for (int r = 0; r < ROWS; ++r) total[r] = 0.0f;
#pragma unroll 1
  for (int step = 0; step < STEPS; ++step) {
    Row<1> row[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const uint index = first + r * SPAN < rows ? first + r * SPAN : rows - 1;
      read_row<COLS, BITS, GROUP, LANES, 1>(row[r], (const device uint4*)w, scales, biases, index,
                                            lane + step * LANES);
    }
    Chunk<BITS> chunk;
    read_staged<BITS, CHUNKS>(chunk, staged, sums, lane + step * LANES);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) total[r] = add_chunk<BITS, GROUP, W>(row[r], 0, chunk, total[r]);
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const float value = lanes_sum<LANES>(total[r]);
    if (lane == 0 && first + r * SPAN < rows) out[ulong(token) * rows + first + r * SPAN] = O(value);
  }
}
