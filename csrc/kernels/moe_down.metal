// What moe_gate_up.metal left, multiplied, weighted and summed in ascending choice, the shared expert scaled by
// sigmoid(scale . x) last; rounded to T and added to residual [T, HIDDEN]. As expert_down.metal, matvec.metal and
// sigmoid_scaled.metal one after the other, bit for bit. SIMD-group j takes choice j, then comes the shared expert's,
// then the scale's.
constexpr int SPAN = 32 / LANES;
constexpr int TILE = SPAN * ROWS;
constexpr int SCALE_BITS = sizeof(G) * 8;
constexpr int SCALE_STEPS = HIDDEN * SCALE_BITS / 128 / SCALE_LANES;
TGMEM float parts[CHOICES + 2][TILE];

const uint token = threadgroup_position_in_grid.y;
const int part = simdgroup_index_in_threadgroup;
const uint lane = thread_index_in_simdgroup % LANES;
const uint tile = threadgroup_position_in_grid.x * TILE;
const uint share = thread_index_in_simdgroup / LANES;
if (part <= CHOICES) {
  const int slot = part < CHOICES ? slot_of[rows[token * CHOICES + part]] : 0;
  const device uchar* record = records + ulong(slot) * ulong(STRIDE);
  const bool shared = part == CHOICES;
  float c[ROWS];
  multiply_down<HIDDEN, INTER, BITS, GROUP, LANES>(
      c, shared ? (const device uint4*)down_w : (const device uint4*)(record + CODES),
      shared ? down_scales : (const device S*)(record + SCALES),
      shared ? down_biases : (const device S*)(record + BIASES), act + ulong(token * (CHOICES + 1) + part) * INTER,
      tile + share, lane);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    if (lane == 0) parts[part][share + r * SPAN] = c[r];
  }
} else {
  Row<SCALE_STEPS> row;
  const uint scale_lane = thread_index_in_simdgroup % SCALE_LANES;
  read_row<HIDDEN, SCALE_BITS, 0, SCALE_LANES, SCALE_STEPS>(row, (const device uint4*)scale_w, scale_w, scale_w, 0,
                                                            scale_lane);
  float dot = 0.0f;
#pragma unroll
  for (int step = 0; step < SCALE_STEPS; ++step) {
    Chunk<SCALE_BITS> chunk;
    read_plain<SCALE_BITS>(chunk, x + ulong(token) * HIDDEN, scale_lane + step * SCALE_LANES);
    dot = add_chunk<SCALE_BITS, 0, G>(row, step, chunk, dot);
  }
  dot = float(T(lanes_sum<SCALE_LANES>(dot)));
  if (thread_index_in_simdgroup == 0) parts[CHOICES + 1][0] = sigmoid(dot);
}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (uint i = thread_position_in_threadgroup.x; i < TILE && tile + i < HIDDEN; i += (CHOICES + 2) * 32) {
  float total = mul_rn(weights[token * CHOICES], parts[0][i]);
  for (int j = 1; j < CHOICES; ++j) total = add_rn(total, mul_rn(weights[token * CHOICES + j], parts[j][i]));
  total = add_rn(total, mul_rn(parts[CHOICES + 1][0], float(T(parts[CHOICES][i]))));
  const ulong at = ulong(token) * HIDDEN + tile + i;
  out[at] = T(add_rn(float(residual[at]), float(T(total))));
}
