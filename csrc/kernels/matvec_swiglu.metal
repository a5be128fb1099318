// silu(x W^T) * (x V^T) for w and v [N, COLS] of one packing, each product and the result rounded to O as matvec.metal
// and swiglu.metal round them.
constexpr int CHUNKS = COLS * BITS / 128;
constexpr int STEPS = CHUNKS / LANES;
constexpr int SPAN = 32 / LANES;
TGMEM float4 staged[(CHUNKS + 1) * (32 / BITS)];
TGMEM float sums[CHUNKS];

const uint rows = w_shape[0], tokens = x_shape[0];
const uint lane = thread_index_in_simdgroup % LANES;
const uint row = (threadgroup_position_in_grid.x * SIMDS + simdgroup_index_in_threadgroup) * SPAN +
                 thread_index_in_simdgroup / LANES;
const uint index = row < rows ? row : rows - 1;
Row<STEPS> gate_row, up_row;
read_row<COLS, BITS, GROUP, LANES, STEPS>(gate_row, (const device uint4*)w, w_scales, w_biases, index, lane);
read_row<COLS, BITS, GROUP, LANES, STEPS>(up_row, (const device uint4*)v, v_scales, v_biases, index, lane);
const uint begin = threadgroup_position_in_grid.y * TOKENS;
for (uint token = begin; token < begin + TOKENS && token < tokens; ++token) {
  if (token > begin) threadgroup_barrier(mem_flags::mem_threadgroup);
  stage<COLS, BITS, SIMDS * 32>(x + ulong(token) * COLS, staged, sums,
                                simdgroup_index_in_threadgroup * 32 + thread_index_in_simdgroup);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float gate = 0.0f, up = 0.0f;
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    Chunk<BITS> chunk;
    read_staged<BITS, CHUNKS>(chunk, staged, sums, lane + step * LANES);
    gate = add_chunk<BITS, GROUP, W>(gate_row, step, chunk, gate);
    up = add_chunk<BITS, GROUP, W>(up_row, step, chunk, up);
  }
  gate = float(O(lanes_sum<LANES>(gate)));
  up = float(O(lanes_sum<LANES>(up)));
  if (lane == 0 && row < rows) out[ulong(token) * rows + row] = O(swiglu(gate, up));
}
