// As matvec.metal, bit for bit, for two matrices of one packing: rows of w [N, COLS] and then of v [M, COLS].
constexpr int CHUNKS = COLS * BITS / 128;
constexpr int STEPS = CHUNKS / LANES;
constexpr int SPAN = 32 / LANES;
TGMEM float4 staged[(CHUNKS + 1) * (32 / BITS)];
TGMEM float sums[CHUNKS];

const uint w_rows = w_shape[0], v_rows = v_shape[0], tokens = x_shape[0];
const uint lane = thread_index_in_simdgroup % LANES;
const uint row = (threadgroup_position_in_grid.x * SIMDS + simdgroup_index_in_threadgroup) * SPAN +
                 thread_index_in_simdgroup / LANES;
const uint index = row < w_rows + v_rows ? row : w_rows + v_rows - 1;
const bool of_w = index < w_rows;
Row<STEPS> weights;
read_row<COLS, BITS, GROUP, LANES, STEPS>(weights, (const device uint4*)(of_w ? w : v), of_w ? w_scales : v_scales,
                                          of_w ? w_biases : v_biases, of_w ? index : index - w_rows, lane);
const uint begin = threadgroup_position_in_grid.y * TOKENS;
for (uint token = begin; token < begin + TOKENS && token < tokens; ++token) {
  if (token > begin) threadgroup_barrier(mem_flags::mem_threadgroup);
  stage<COLS, BITS, SIMDS * 32>(x + ulong(token) * COLS, staged, sums,
                                simdgroup_index_in_threadgroup * 32 + thread_index_in_simdgroup);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float total = 0.0f;
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    Chunk<BITS> chunk;
    read_staged<BITS, CHUNKS>(chunk, staged, sums, lane + step * LANES);
    total = add_chunk<BITS, GROUP, W>(weights, step, chunk, total);
  }
  total = lanes_sum<LANES>(total);
  if (lane == 0 && row < w_rows) w_out[ulong(token) * w_rows + row] = O(total);
  if (lane == 0 && row >= w_rows && row < w_rows + v_rows) v_out[ulong(token) * v_rows + row - w_rows] = O(total);
}
