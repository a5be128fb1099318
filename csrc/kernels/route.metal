// total = x + y, its norm, and the choice of experts by w [EXPERTS, COLS], a threadgroup a token: add_rms_norm.metal,
// matvec.metal and choose.metal one after the other, bit for bit.
constexpr int CHUNKS = COLS * BITS / 128;
constexpr int STEPS = CHUNKS / LANES;
constexpr int SPAN = 32 / LANES;
TGMEM float4 staged[(CHUNKS + 1) * (32 / BITS)];
TGMEM float sums[CHUNKS];
TGMEM float parts[SIMDS];
TGMEM float logits[EXPERTS];
TGMEM float ordered[CHOICES];

const ulong token = threadgroup_position_in_grid.x;
const uint index = thread_position_in_threadgroup.x;
const bool norms = simdgroup_index_in_threadgroup < NORM_SIMDS;
HeldRow<COLS, NORM_SIMDS> held, added, weight;
float square = 0.0f;
if (norms) {
  hold_row(held, x + token * COLS, index);
  hold_row(added, y + token * COLS, index);
  hold_row(weight, norm, index);
  add_row<T>(held, added);
  write_row(held, total + token * COLS, index);
  square = row_square(held);
}
square = threadgroup_sum<NORM_SIMDS>(square, parts, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
if (norms) {
  norm_row<T>(held, weight, square, eps[0]);
  write_row(held, normed + token * COLS, index);
  stage_row<BITS>(held, staged, sums, index);
}
threadgroup_barrier(mem_flags::mem_threadgroup);
const uint lane = thread_index_in_simdgroup % LANES;
for (uint tile = 0; tile < EXPERTS; tile += SIMDS * SPAN) {
  const uint row = tile + simdgroup_index_in_threadgroup * SPAN + thread_index_in_simdgroup / LANES;
  Row<STEPS> row_of;
  read_row<COLS, BITS, GROUP, LANES, STEPS>(row_of, (const device uint4*)w, scales, biases,
                                            row < EXPERTS ? row : EXPERTS - 1, lane);
  float logit = 0.0f;
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    Chunk<BITS> chunk;
    read_staged<BITS, CHUNKS>(chunk, staged, sums, lane + step * LANES);
    logit = add_chunk<BITS, GROUP, W>(row_of, step, chunk, logit);
  }
  logit = lanes_sum<LANES>(logit);
  if (lane == 0 && row < EXPERTS) logits[row] = logit;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (simdgroup_index_in_threadgroup == 0) {
  choose<EXPERTS, CHOICES>((const threadgroup float*)logits, ordered, ids + token * CHOICES, weights + token * CHOICES,
                           thread_index_in_simdgroup);
}
