// From q [T, HEADS, 2 * WIDTH], a query and its gate a head, and k [T, KV_HEADS, WIDTH]: queries and keys, each head's
// rms norm by q_norm or k_norm [WIDTH], then rotate-half RoPE of its first DIMS channels at position offset[0] + row,
// with frequencies [DIMS / 2]; and gates. A SIMD-group a head; lane l holds channels l, l + 32, ...
constexpr int HELD = WIDTH / 32;
constexpr int HALF = DIMS / 64;
const uint of_queries = uint(q_shape[0]) * HEADS, heads = of_queries + uint(q_shape[0]) * KV_HEADS;
const uint index = threadgroup_position_in_grid.x * SIMDS + simdgroup_index_in_threadgroup;
const uint head = index < heads ? index : heads - 1;
const bool query = head < of_queries;
const uint row = query ? head / HEADS : (head - of_queries) / KV_HEADS;
const uint lane = thread_index_in_simdgroup;
const ulong from = ulong(query ? 2 * head : head - of_queries) * WIDTH + lane;
const ulong to = ulong(query ? head : head - of_queries) * WIDTH + lane;
float v[HELD];
float square = 0.0f;
for (int i = 0; i < HELD; ++i) {
  v[i] = float(query ? q[from + 32 * i] : k[from + 32 * i]);
  square = fma(v[i], v[i], square);
}
const float scale = rsqrt_f32(add_rn(div_rn(lanes_sum<32>(square), float(WIDTH)), eps[0]));
for (int i = 0; i < HELD; ++i) {
  v[i] = mul_rn(mul_rn(v[i], scale), query ? q_norm[lane + 32 * i] : k_norm[lane + 32 * i]);
}
const float position = float(offset[0] + int(row));
for (int i = 0; i < HALF; ++i) {
  const float angle = mul_rn(position, frequencies[lane + 32 * i]);
  const float c = cos_f32(angle), s = sin_f32(angle);
  const float first = v[i], second = v[i + HALF];
  v[i] = fma(first, c, -mul_rn(second, s));
  v[i + HALF] = fma(second, c, mul_rn(first, s));
}
for (int i = 0; i < HELD && index < heads; ++i) {
  if (query) {
    queries[to + 32 * i] = T(v[i]);
    gates[to + 32 * i] = q[from + WIDTH + 32 * i];
  } else {
    keys[to + 32 * i] = T(v[i]);
  }
}
