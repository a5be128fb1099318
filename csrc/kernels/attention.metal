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
    const ulong row = bank + ulong(key <= last ? key : last) * WIDTH, group = row / (GROUP > 0 ? GROUP : 1);
    float key_scale = 1.0f, key_bias = 0.0f, value_scale = 1.0f, value_bias = 0.0f;
    if (GROUP > 0) {
      key_scale = float(key_scales[group]);
      key_bias = float(key_biases[group]);
      value_scale = float(value_scales[group]);
      value_bias = float(value_biases[group]);
    }
    read_eight(keys, row, key_scale, key_bias, k_low[k], k_high[k]);
    read_eight(values, row, value_scale, value_bias, v_low[k], v_high[k]);
  }
  float score[KEYS_AT_ONCE];
  float highest = top;
#pragma unroll
  for (int k = 0; k < KEYS_AT_ONCE; ++k) {
    float dot = mul_rn(q_low.x, k_low[k].x);
    dot = fma(q_low.y, k_low[k].y, dot);
    dot = fma(q_low.z, k_low[k].z, dot);
    dot = fma(q_low.w, k_low[k].w, dot);
    dot = fma(q_high.x, k_high[k].x, dot);
    dot = fma(q_high.y, k_high[k].y, dot);
    dot = fma(q_high.z, k_high[k].z, dot);
    dot = fma(q_high.w, k_high[k].w, dot);
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
    sum[0] = fma(weight, v_low[k].x, sum[0]);
    sum[1] = fma(weight, v_low[k].y, sum[1]);
    sum[2] = fma(weight, v_low[k].z, sum[2]);
    sum[3] = fma(weight, v_low[k].w, sum[3]);
    sum[4] = fma(weight, v_high[k].x, sum[4]);
    sum[5] = fma(weight, v_high[k].y, sum[5]);
    sum[6] = fma(weight, v_high[k].z, sum[6]);
    sum[7] = fma(weight, v_high[k].w, sum[7]);
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
  if (GATED) value = mul_rn(value, div_rn(1.0f, add_rn(1.0f, exp_f32(-float(gate[query + i])))));
  out[query + i] = T(value);
}
