// x [T, COLS] times w [N, COLS] transposed: [T, N] of type O. A threadgroup takes SIMDS * SPAN * ROWS rows of w, all of
// whose loads are under way at once, and multiplies them by up to TOKENS rows of x, one after the other.
constexpr int CHUNKS = COLS * BITS / 128;
constexpr int STEPS = CHUNKS / LANES;
constexpr int SPAN = 32 / LANES;
TGMEM float4 staged[(CHUNKS + 1) * (32 / BITS)];
TGMEM float sums[CHUNKS];

const uint rows = w_shape[0], tokens = x_shape[0];
const uint lane = thread_index_in_simdgroup % LANES;
const uint first = (threadgroup_position_in_grid.x * SIMDS + simdgroup_index_in_threadgroup) * SPAN * ROWS +
                   thread_index_in_simdgroup / LANES;
Row<STEPS> row[ROWS];
#pragma unroll
for (int r = 0; r < ROWS; ++r) {
  const uint index = first + r * SPAN < rows ? first + r * SPAN : rows - 1;
  read_row<COLS, BITS, GROUP, LANES, STEPS>(row[r], (const device uint4*)w, scales, biases, index, lane);
}
const uint begin = threadgroup_position_in_grid.y * TOKENS;
for (uint token = begin; token < begin + TOKENS && token < tokens; ++token) {
  if (token > begin) threadgroup_barrier(mem_flags::mem_threadgroup);
  stage<COLS, BITS, SIMDS * 32>(x + ulong(token) * COLS, staged, sums,
                                simdgroup_index_in_threadgroup * 32 + thread_index_in_simdgroup);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float total[ROWS];
  for (int r = 0; r < ROWS; ++r) total[r] = 0.0f;
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    Chunk<BITS> chunk;
    read_staged<BITS, CHUNKS>(chunk, staged, sums, lane + step * LANES);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) total[r] = add_chunk<BITS, GROUP, W>(row[r], step, chunk, total[r]);
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const float value = lanes_sum<LANES>(total[r]);
    if (lane == 0 && first + r * SPAN < rows) out[ulong(token) * rows + first + r * SPAN] = O(value);
  }
}
