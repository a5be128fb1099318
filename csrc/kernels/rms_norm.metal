// x [rows, WIDTH] * rsqrt(mean x^2 + eps[0]) * w [WIDTH], in x's type. A threadgroup a row, whose numbers stay in
// registers, four to a load.
constexpr int HELD = (WIDTH / 4 + SIMDS * 32 - 1) / (SIMDS * 32);
TGMEM float parts[SIMDS];
const uint index = thread_position_in_threadgroup.x;
const ulong row = ulong(threadgroup_position_in_grid.x) * WIDTH;
float4 v[HELD], weight[HELD];
float square = 0.0f;
#pragma unroll
for (int i = 0; i < HELD; ++i) {
  const uint quad = index + i * SIMDS * 32;
  v[i] = weight[i] = quad_of(0.0f, 0.0f, 0.0f, 0.0f);
  if (quad < WIDTH / 4) {
    v[i] = load4(x + row + 4 * quad);
    weight[i] = load4(w + 4 * quad);
  }
  square = fma(v[i].x, v[i].x, square);
  square = fma(v[i].y, v[i].y, square);
  square = fma(v[i].z, v[i].z, square);
  square = fma(v[i].w, v[i].w, square);
}
square = threadgroup_sum<SIMDS>(square, parts, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
const float scale = rsqrt_f32(add_rn(div_rn(square, float(WIDTH)), eps[0]));
#pragma unroll
for (int i = 0; i < HELD; ++i) {
  const uint quad = index + i * SIMDS * 32;
  if (quad < WIDTH / 4) {
    out[row + 4 * quad] = T(mul_rn(mul_rn(v[i].x, scale), weight[i].x));
    out[row + 4 * quad + 1] = T(mul_rn(mul_rn(v[i].y, scale), weight[i].y));
    out[row + 4 * quad + 2] = T(mul_rn(mul_rn(v[i].z, scale), weight[i].z));
    out[row + 4 * quad + 3] = T(mul_rn(mul_rn(v[i].w, scale), weight[i].w));
  }
}
