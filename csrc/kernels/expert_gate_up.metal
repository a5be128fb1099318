// silu(W_g x) * (W_u x) of each chosen expert, f32 [T * CHOICES, INTER], each in the order in which expert_down.metal
// reads it. A threadgroup takes one choice and SIMDS * SPAN * PAIRS of its INTER gate and up rows.
constexpr int CHUNKS = HIDDEN * BITS / 128;
constexpr int STEPS = CHUNKS / LANES;
constexpr int SPAN = 32 / LANES;
TGMEM float4 staged[(CHUNKS + 1) * (32 / BITS)];
TGMEM float sums[CHUNKS];

const uint choice = threadgroup_position_in_grid.y;
const uint lane = thread_index_in_simdgroup % LANES;
const uint first = (threadgroup_position_in_grid.x * SIMDS + simdgroup_index_in_threadgroup) * SPAN * PAIRS +
                   thread_index_in_simdgroup / LANES;
const int slot = slot_of[rows[choice]];
const device uchar* record = records + ulong(slot < 0 ? 0 : slot) * ulong(STRIDE);
const device uint4* codes = (const device uint4*)(record + CODES);
const device S* scales = (const device S*)(record + SCALES);
const device S* biases = (const device S*)(record + BIASES);

Row<STEPS> gate[PAIRS], up[PAIRS];
if (slot >= 0) {
#pragma unroll
  for (int p = 0; p < PAIRS; ++p) {
    const uint row = first + p * SPAN < INTER ? first + p * SPAN : INTER - 1;
    read_row<HIDDEN, BITS, GROUP, LANES, STEPS>(gate[p], codes, scales, biases, row, lane);
    read_row<HIDDEN, BITS, GROUP, LANES, STEPS>(up[p], codes, scales, biases, INTER + row, lane);
  }
}
stage<HIDDEN, BITS, SIMDS * 32>(x + ulong(choice / CHOICES) * HIDDEN, staged, sums,
                                simdgroup_index_in_threadgroup * 32 + thread_index_in_simdgroup);
threadgroup_barrier(mem_flags::mem_threadgroup);
float g[PAIRS], u[PAIRS];
for (int p = 0; p < PAIRS; ++p) g[p] = u[p] = 0.0f;
if (slot >= 0) {
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    Chunk<BITS> chunk;
    read_staged<BITS, CHUNKS>(chunk, staged, sums, lane + step * LANES);
#pragma unroll
    for (int p = 0; p < PAIRS; ++p) {
      g[p] = add_chunk<BITS, GROUP, uint>(gate[p], step, chunk, g[p]);
      u[p] = add_chunk<BITS, GROUP, uint>(up[p], step, chunk, u[p]);
    }
  }
}
#pragma unroll
for (int p = 0; p < PAIRS; ++p) {
  const float value = swiglu(lanes_sum<LANES>(g[p]), lanes_sum<LANES>(u[p]));
  const uint channel = first + p * SPAN;
  if (lane == 0 && channel < INTER) {
    act[choice * INTER + laid_out<DOWN_BITS, INTER * DOWN_BITS / 128>(channel)] =
        mul_rn(value, in_place_scale<DOWN_BITS>(channel % 4));
  }
}
