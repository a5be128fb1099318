// rms norm of each head of x [T, HEADS, WIDTH] by w [WIDTH], then rotate-half RoPE of its first DIMS channels at
// position offset[0] + row, with frequencies [DIMS / 2]. A SIMD-group a head; lane l holds channels l, l + 32, ...
constexpr int HELD = WIDTH / 32;
constexpr int HALF = DIMS / 64;
const uint heads = uint(x_shape[0]) * HEADS;
const uint index = threadgroup_position_in_grid.x * SIMDS + simdgroup_index_in_threadgroup;
const uint head = index < heads ? index : heads - 1;
const uint lane = thread_index_in_simdgroup;
const ulong at = ulong(head) * WIDTH + lane;
float v[HELD];
float square = 0.0f;
for (int i = 0; i < HELD; ++i) {
  v[i] = float(x[at + 32 * i]);
  square = fma(v[i], v[i], square);
}
const float scale = rsqrt_f32(add_rn(div_rn(lanes_sum<32>(square), float(WIDTH)), eps[0]));
for (int i = 0; i < HELD; ++i) v[i] = mul_rn(mul_rn(v[i], scale), w[lane + 32 * i]);
const float position = float(offset[0] + int(head / HEADS));
for (int i = 0; i < HALF; ++i) {
  const float angle = mul_rn(position, frequencies[lane + 32 * i]);
  const float c = cos_f32(angle), s = sin_f32(angle);
  const float first = v[i], second = v[i + HALF];
  v[i] = fma(first, c, -mul_rn(second, s));
  v[i + HALF] = fma(second, c, mul_rn(first, s));
}
if (index < heads) {
  for (int i = 0; i < HELD; ++i) out[at + 32 * i] = T(v[i]);
}
