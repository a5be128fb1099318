// As attention.metal, with other bits, for many rows: QUERIES neighbouring queries of a key head share each key that is
// read, WIDTH / 8 lanes taking them together. Every query meets its keys in the same steps, whichever queries it shares
// them with: a step that holds no key for it adds zeros to its sums.
constexpr int LANES = WIDTH / 8;
constexpr int SPAN = 32 / LANES;
constexpr int RATIO = HEADS / KV_HEADS;
constexpr int KEYS_AT_ONCE = 4;
const uint lane = thread_index_in_simdgroup % LANES, channel = lane * 8;
const uint kv_head = threadgroup_position_in_grid.y;
const ulong bank = ulong(kv_head) * ulong(keys_shape[1]) * WIDTH + channel;
const uint queries = x_shape[0] * RATIO;
const uint begin = (threadgroup_position_in_grid.x * SIMDS + simdgroup_index_in_threadgroup) * SPAN * QUERIES;
const uint first = begin + thread_index_in_simdgroup / LANES * QUERIES;
const uint end = begin + SPAN * QUERIES < queries ? begin + SPAN * QUERIES : queries;
const int until = begin < queries ? offset[0] + int((end - 1) / RATIO) : -1;
const float none = bits_to_float(0xFF800000u);  // -infinity

float4 q_low[QUERIES], q_high[QUERIES];
float sum[QUERIES][8];
float top[QUERIES], total[QUERIES];
int last[QUERIES];
ulong place[QUERIES];
#pragma unroll
for (int j = 0; j < QUERIES; ++j) {
  const uint query = first + j < queries ? first + j : queries - 1;
  last[j] = offset[0] + int(query / RATIO);
  place[j] = (ulong(query / RATIO) * HEADS + kv_head * RATIO + query % RATIO) * WIDTH + channel;
  q_low[j] = load4(x + place[j]);
  q_high[j] = load4(x + place[j] + 4);
  top[j] = none;
  total[j] = 0.0f;
  for (int i = 0; i < 8; ++i) sum[j][i] = 0.0f;
}
for (int base = 0; base <= until; base += KEYS_AT_ONCE) {
  // Values are read when the scores are done: all at once they would need more registers than an Apple GPU gives.
  float dots[QUERIES][KEYS_AT_ONCE], weight[QUERIES];
#pragma unroll
  for (int k = 0; k < KEYS_AT_ONCE; ++k) {
    const ulong row = bank + ulong(base + k <= until ? base + k : until) * WIDTH;
    float4 k_low, k_high;
    read_kept<GROUP>(keys, key_scales, key_biases, row, k_low, k_high);
#pragma unroll
    for (int j = 0; j < QUERIES; ++j) dots[j][k] = dot_eight(q_low[j], q_high[j], k_low, k_high);
  }
#pragma unroll
  for (int j = 0; j < QUERIES; ++j) {
    // Lane l has the score of key l % KEYS_AT_ONCE.
    const float dot = mul_rn(rows_sum<LANES>(dots[j], lane), scale[0]);
    const float score = base + int(lane % KEYS_AT_ONCE) <= last[j] ? dot : none;
    const float here = lanes_max<KEYS_AT_ONCE>(score);
    const float highest = top[j] > here ? top[j] : here;
    const float shrink = exp_f32(add_rn(top[j], -highest));
    weight[j] = exp_f32(add_rn(score, -highest));
    top[j] = highest;
    total[j] = fma(total[j], shrink, weight[j]);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[j][i] = mul_rn(sum[j][i], shrink);
  }
#pragma unroll
  for (int k = 0; k < KEYS_AT_ONCE; ++k) {
    const ulong row = bank + ulong(base + k <= until ? base + k : until) * WIDTH;
    float4 v_low, v_high;
    read_kept<GROUP>(values, value_scales, value_biases, row, v_low, v_high);
#pragma unroll
    for (int j = 0; j < QUERIES; ++j) {
      add_eight(sum[j], from_lane(weight[j], thread_index_in_simdgroup - lane + k), v_low, v_high);
    }
  }
}
#pragma unroll
for (int j = 0; j < QUERIES; ++j) {
  const float whole = lanes_sum<KEYS_AT_ONCE>(total[j]);
  if (first + j < queries) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float value = div_rn(sum[j][i], whole);
      if (GATED) value = mul_rn(value, sigmoid(float(gate[place[j] + i])));
      out[place[j] + i] = T(value);
    }
  }
}
