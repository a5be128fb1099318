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
Row<STEPS> gate_rows[PAIRS], up_rows[PAIRS];
if (slot >= 0) {
  const device uchar* record = records + ulong(slot) * ulong(STRIDE);
  const device uint4* codes = (const device uint4*)(record + CODES);
  const device S* scales = (const device S*)(record + SCALES);
  const device S* biases = (const device S*)(record + BIASES);
  constexpr uint GROUPS = HIDDEN / GROUP;
  read_gate_up<HIDDEN, INTER, BITS, GROUP, LANES>(gate_rows, up_rows, codes, scales, biases, codes + INTER * CHUNKS,
                                                  scales + INTER * GROUPS, biases + INTER * GROUPS, first, lane);
}
stage<HIDDEN, BITS, SIMDS * 32>(x + ulong(choice / CHOICES) * HIDDEN, staged, sums,
                                simdgroup_index_in_threadgroup * 32 + thread_index_in_simdgroup);
threadgroup_barrier(mem_flags::mem_threadgroup);
float gate[PAIRS], up[PAIRS];
if (slot >= 0) multiply_gate_up<CHUNKS, BITS, GROUP, LANES>(gate, up, gate_rows, up_rows, staged, sums, lane);
#pragma unroll
for (int p = 0; p < PAIRS; ++p) {
  const uint channel = first + p * SPAN;
  const float value = slot >= 0 ? swiglu(gate[p], up[p]) : 0.0f;
  if (lane == 0 && channel < INTER) {
    act[choice * INTER + laid_out<DOWN_BITS, INTER * DOWN_BITS / 128>(channel)] =
        mul_rn(value, in_place_scale<DOWN_BITS>(channel % 4));
  }
}
