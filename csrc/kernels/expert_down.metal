// W_d act of each chosen expert: weighted and summed in ascending choice, f32 [T, HIDDEN], or, where CONTRIBUTIONS,
// each by itself, f32 [T, CHOICES, HIDDEN]. A threadgroup takes SIMDS * SPAN rows of all a token's experts, BATCH
// experts at a time.
constexpr int CHUNKS = INTER * BITS / 128;
constexpr int STEPS = CHUNKS / LANES;
constexpr int SPAN = 32 / LANES;
TGMEM float4 staged[(BATCH * CHUNKS + 1) * (32 / BITS)];
TGMEM float sums[BATCH * CHUNKS];

const uint token = threadgroup_position_in_grid.y;
const uint lane = thread_index_in_simdgroup % LANES;
const uint row = (threadgroup_position_in_grid.x * SIMDS + simdgroup_index_in_threadgroup) * SPAN +
                 thread_index_in_simdgroup / LANES;
const uint readable = row < HIDDEN ? row : HIDDEN - 1;
float total = 0.0f;
for (int batch = 0; batch < CHOICES; batch += BATCH) {
  Row<STEPS> down[BATCH];
  int slots[BATCH];
#pragma unroll
  for (int j = 0; j < BATCH; ++j) {
    slots[j] = slot_of[rows[token * CHOICES + batch + j]];
    if (slots[j] >= 0) {
      const device uchar* record = records + ulong(slots[j]) * ulong(STRIDE);
      read_row<INTER, BITS, GROUP, LANES, STEPS>(down[j], (const device uint4*)(record + CODES),
                                                 (const device S*)(record + SCALES),
                                                 (const device S*)(record + BIASES), readable, lane);
    }
  }
  if (batch > 0) threadgroup_barrier(mem_flags::mem_threadgroup);
  stage<BATCH * INTER, BITS, SIMDS * 32>(act + ulong(token * CHOICES + batch) * INTER, staged, sums,
                                         simdgroup_index_in_threadgroup * 32 + thread_index_in_simdgroup);
  threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
  for (int j = 0; j < BATCH; ++j) {
    float c = 0.0f;
    if (slots[j] >= 0) {
      c = lanes_sum<LANES>(row_dot<BITS, GROUP, LANES, BATCH * CHUNKS, uint>(down[j], staged, sums, j * CHUNKS, lane));
    }
    const uint choice = token * CHOICES + batch + j;
    if (CONTRIBUTIONS) {
      if (lane == 0 && row < HIDDEN) out[ulong(choice) * HIDDEN + row] = c;
    } else {
      const float weighted = mul_rn(weights[choice], c);
      total = batch + j == 0 ? weighted : add_rn(total, weighted);
    }
  }
}
if (!CONTRIBUTIONS && lane == 0 && row < HIDDEN) out[ulong(token) * HIDDEN + row] = total;
