// Logits x W^T of w [EXPERTS, COLS] and the choice of experts from them, a threadgroup a token: as matvec.metal and
// choose.metal one after the other, bit for bit.
constexpr int CHUNKS = COLS * BITS / 128;
constexpr int STEPS = CHUNKS / LANES;
constexpr int SPAN = 32 / LANES;
TGMEM float4 staged[(CHUNKS + 1) * (32 / BITS)];
TGMEM float sums[CHUNKS];
TGMEM float logits[EXPERTS];
TGMEM float ordered[CHOICES];

const ulong token = threadgroup_position_in_grid.x;
const uint lane = thread_index_in_simdgroup % LANES;
stage<COLS, BITS, SIMDS * 32>(x + token * COLS, staged, sums,
                              simdgroup_index_in_threadgroup * 32 + thread_index_in_simdgroup);
threadgroup_barrier(mem_flags::mem_threadgroup);
for (uint tile = 0; tile < EXPERTS; tile += SIMDS * SPAN) {
  const uint row = tile + simdgroup_index_in_threadgroup * SPAN + thread_index_in_simdgroup / LANES;
  Row<STEPS> weight;
  read_row<COLS, BITS, GROUP, LANES, STEPS>(weight, (const device uint4*)w, scales, biases,
                                            row < EXPERTS ? row : EXPERTS - 1, lane);
  float total = 0.0f;
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    Chunk<BITS> chunk;
    read_staged<BITS, CHUNKS>(chunk, staged, sums, lane + step * LANES);
    total = add_chunk<BITS, GROUP, W>(weight, step, chunk, total);
  }
  total = lanes_sum<LANES>(total);
  if (lane == 0 && row < EXPERTS) logits[row] = total;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (simdgroup_index_in_threadgroup == 0) {
  choose<EXPERTS, CHOICES>((const threadgroup float*)logits, ordered, ids + token * CHOICES, weights + token * CHOICES,
                           thread_index_in_simdgroup);
}
