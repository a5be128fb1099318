// As expert_gate_up.metal for the chosen experts, and as matvec_swiglu.metal for the shared one, which is each token's
// last: f32 [T * (CHOICES + 1), INTER].
constexpr int CHUNKS = HIDDEN * BITS / 128;
constexpr int STEPS = CHUNKS / LANES;
constexpr int SPAN = 32 / LANES;
constexpr int ALL = CHOICES + 1;
TGMEM float4 staged[(CHUNKS + 1) * (32 / BITS)];
TGMEM float sums[CHUNKS];

const uint work = threadgroup_position_in_grid.y;
const uint token = work / ALL;
const bool shared = work % ALL == CHOICES;
const uint lane = thread_index_in_simdgroup % LANES;
const uint first = (threadgroup_position_in_grid.x * SIMDS + simdgroup_index_in_threadgroup) * SPAN * PAIRS +
                   thread_index_in_simdgroup / LANES;
Row<STEPS> gate_rows[PAIRS], up_rows[PAIRS];
if (shared) {
  read_gate_up<HIDDEN, INTER, BITS, GROUP, LANES>(gate_rows, up_rows, (const device uint4*)gate_w, gate_scales,
                                                  gate_biases, (const device uint4*)up_w, up_scales, up_biases, first,
                                                  lane);
} else {
  const device uchar* record = records + ulong(slot_of[rows[token * CHOICES + work % ALL]]) * ulong(STRIDE);
  const device uint4* codes = (const device uint4*)(record + CODES);
  const device S* scales = (const device S*)(record + SCALES);
  const device S* biases = (const device S*)(record + BIASES);
  constexpr uint GROUPS = HIDDEN / GROUP;
  read_gate_up<HIDDEN, INTER, BITS, GROUP, LANES>(gate_rows, up_rows, codes, scales, biases, codes + INTER * CHUNKS,
                                                  scales + INTER * GROUPS, biases + INTER * GROUPS, first, lane);
}
stage<HIDDEN, BITS, SIMDS * 32>(x + ulong(token) * HIDDEN, staged, sums,
                                simdgroup_index_in_threadgroup * 32 + thread_index_in_simdgroup);
threadgroup_barrier(mem_flags::mem_threadgroup);
float gate[PAIRS], up[PAIRS];
multiply_gate_up<CHUNKS, BITS, GROUP, LANES>(gate, up, gate_rows, up_rows, staged, sums, lane);
#pragma unroll
for (int p = 0; p < PAIRS; ++p) {
  const uint channel = first + p * SPAN;
  float value = swiglu(gate[p], up[p]);
  if (shared) value = float(T(swiglu(float(T(gate[p])), float(T(up[p])))));
  if (lane == 0 && channel < INTER) {
    act[work * INTER + laid_out<DOWN_BITS, INTER * DOWN_BITS / 128>(channel)] =
        mul_rn(value, in_place_scale<DOWN_BITS>(channel % 4));
  }
}
