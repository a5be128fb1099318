// softmax(scale[0] q k^T) v of one query a threadgroup, x [T, HEADS, WIDTH] over keys and values [KV_HEADS, capacity,
// WIDTH], codes in groups of GROUP unless that is 0, row t seeing positions up to offset[0] + t; times sigmoid(gate)
// where GATED. WIDTH / 8 lanes share a key; each such part takes every PARTS-th key with a running maximum, and at the
// end the parts are merged in order. So a result depends on the keys seen, not on the capacity.
constexpr int LANES = WIDTH / 8;
constexpr int SPAN = 32 / LANES;
constexpr int PARTS = SIMDS * SPAN;
constexpr int KEYS_AT_ONCE = 4;
TGMEM float tops[PARTS], totals[PARTS];
TGMEM float sums[PARTS][WIDTH];
const uint head = threadgroup_position_in_grid.x;
const uint token = threadgroup_position_in_grid.y;
const uint channel = thread_index_in_simdgroup % LANES * 8;
const int simdgroup = simdgroup_index_in_threadgroup, part = simdgroup * SPAN + thread_index_in_simdgroup / LANES;
const ulong query = (ulong(token) * HEADS + head) * WIDTH;
const ulong bank = ulong(head / (HEADS / KV_HEADS)) * ulong(keys_shape[1]) * WIDTH + channel;
const int last = offset[0] + int(token);
const float none = bits_to_float(0xFF800000u);  // -infinity

const float4 q_low = load4(x + query + channel), q_high = load4(x + query + channel + 4);
float sum[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
float top = none, total = 0.0f;
for (int base = simdgroup * SPAN; base <= last; base += PARTS * KEYS_AT_ONCE) {
  float4 k_low[KEYS_AT_ONCE], k_high[KEYS_AT_ONCE], v_low[KEYS_AT_ONCE], v_high[KEYS_AT_ONCE];
#pragma unroll
  for (int k = 0; k < KEYS_AT_ONCE; ++k) {
    const int key = base - simdgroup * SPAN + part + k * PARTS;
    const ulong row = bank + ulong(key <= last ? key : last) * WIDTH;
    read_kept<GROUP>(keys, key_scales, key_biases, row, k_low[k], k_high[k]);
    read_kept<GROUP>(values, value_scales, value_biases, row, v_low[k], v_high[k]);
  }
  float score[KEYS_AT_ONCE];
  float highest = top;
#pragma unroll
  for (int k = 0; k < KEYS_AT_ONCE; ++k) {
    const float dot = dot_eight(q_low, q_high, k_low[k], k_high[k]);
    const bool seen = base - simdgroup * SPAN + part + k * PARTS <= last;
    score[k] = mul_rn(lanes_sum<LANES>(dot), scale[0]);
    score[k] = seen ? score[k] : none;
    highest = score[k] > highest ? score[k] : highest;
  }
  const float at = highest == none ? 0.0f : highest;
  const float shrink = exp_f32(add_rn(top, -at));
  total = mul_rn(total, shrink);
#pragma unroll
  for (int i = 0; i < 8; ++i) sum[i] = mul_rn(sum[i], shrink);
#pragma unroll
  for (int k = 0; k < KEYS_AT_ONCE; ++k) {
    const float weight = exp_f32(add_rn(score[k], -at));
    total = add_rn(total, weight);
    add_eight(sum, weight, v_low[k], v_high[k]);
  }
  top = highest;
}
if (channel == 0) {
  tops[part] = top;
  totals[part] = total;
}
#pragma unroll
for (int i = 0; i < 8; ++i) sums[part][channel + i] = sum[i];
threadgroup_barrier(mem_flags::mem_threadgroup);
for (int p = 0; p < PARTS; ++p) top = tops[p] > top ? tops[p] : top;
for (uint i = thread_position_in_threadgroup.x; i < WIDTH; i += SIMDS * 32) {
  float weight = 0.0f, value = 0.0f;
  for (int p = 0; p < PARTS; ++p) {
    const float shrink = exp_f32(add_rn(tops[p], -top));
    weight = fma(totals[p], shrink, weight);
    value = fma(sums[p][i], shrink, value);
  }
  value = div_rn(value, weight);
  if (GATED) value = mul_rn(value, sigmoid(float(gate[query + i])));
  out[query + i] = T(value);
}
