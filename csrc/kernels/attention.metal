// softmax(scale[0] q k^T) v of one query a threadgroup, q [T, HEADS, WIDTH] over keys and values [KV_HEADS, capacity,
// WIDTH], row t seeing positions up to offset[0] + t; times sigmoid(gate) where GATED. SIMD-group s takes keys s,
// s + SIMDS, ... with a running maximum; at the end the SIMD-groups are merged in order. So a result depends on the
// keys seen, not on the capacity.
constexpr int HELD = WIDTH / 32;
constexpr int KEYS_AT_ONCE = 4;
TGMEM float tops[SIMDS], totals[SIMDS], parts[SIMDS][WIDTH];
const uint head = threadgroup_position_in_grid.x;
const uint token = threadgroup_position_in_grid.y;
const uint simdgroup = simdgroup_index_in_threadgroup, lane = thread_index_in_simdgroup;
const ulong query = (ulong(token) * HEADS + head) * WIDTH;
const ulong bank = ulong(head / (HEADS / KV_HEADS)) * ulong(keys_shape[1]) * WIDTH + lane;
const int last = offset[0] + int(token);
const float none = bits_to_float(0xFF800000u);  // -infinity

float q[HELD], sum[HELD];
for (int i = 0; i < HELD; ++i) {
  q[i] = mul_rn(float(x[query + lane + 32 * i]), scale[0]);
  sum[i] = 0.0f;
}
float top = none, total = 0.0f;
for (int first = simdgroup; first <= last; first += SIMDS * KEYS_AT_ONCE) {
  float score[KEYS_AT_ONCE];
  float highest = top;
#pragma unroll
  for (int k = 0; k < KEYS_AT_ONCE; ++k) {
    const int key = first + k * SIMDS;
    const ulong row = bank + ulong(key <= last ? key : last) * WIDTH;
    float dot = 0.0f;
    for (int i = 0; i < HELD; ++i) dot = fma(q[i], float(keys[row + 32 * i]), dot);
    dot = lanes_sum<32>(dot);
    score[k] = key <= last ? dot : none;
    highest = score[k] > highest ? score[k] : highest;
  }
  const float shrink = exp_f32(add_rn(top, -highest));
  total = mul_rn(total, shrink);
  for (int i = 0; i < HELD; ++i) sum[i] = mul_rn(sum[i], shrink);
#pragma unroll
  for (int k = 0; k < KEYS_AT_ONCE; ++k) {
    const int key = first + k * SIMDS;
    const ulong row = bank + ulong(key <= last ? key : last) * WIDTH;
    const float weight = exp_f32(add_rn(score[k], -highest));
    total = add_rn(total, weight);
    for (int i = 0; i < HELD; ++i) sum[i] = fma(weight, float(values[row + 32 * i]), sum[i]);
  }
  top = highest;
}
if (lane == 0) {
  tops[simdgroup] = top;
  totals[simdgroup] = total;
}
for (int i = 0; i < HELD; ++i) parts[simdgroup][lane + 32 * i] = sum[i];
threadgroup_barrier(mem_flags::mem_threadgroup);
for (int s = 0; s < SIMDS; ++s) top = tops[s] > top ? tops[s] : top;
for (uint channel = thread_position_in_threadgroup.x; channel < WIDTH; channel += SIMDS * 32) {
  float weight = 0.0f, value = 0.0f;
  for (int s = 0; s < SIMDS; ++s) {
    const float shrink = exp_f32(add_rn(tops[s], -top));
    weight = fma(totals[s], shrink, weight);
    value = fma(parts[s][channel], shrink, value);
  }
  value = div_rn(value, weight);
  if (GATED) value = mul_rn(value, div_rn(1.0f, add_rn(1.0f, exp_f32(-float(gate[query + channel])))));
  out[query + channel] = T(value);
}
