// x [rows, WIDTH] * rsqrt(mean x^2 + eps[0]) * w [WIDTH], in x's type. A threadgroup a row.
TGMEM float parts[SIMDS];
const uint index = thread_position_in_threadgroup.x;
const ulong row = ulong(threadgroup_position_in_grid.x) * WIDTH;
float square = 0.0f;
for (uint i = index; i < WIDTH; i += SIMDS * 32) {
  const float v = float(x[row + i]);
  square = fma(v, v, square);
}
square = threadgroup_sum<SIMDS>(square, parts, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
const float scale = rsqrt_f32(add_rn(div_rn(square, float(WIDTH)), eps[0]));
for (uint i = index; i < WIDTH; i += SIMDS * 32) {
  out[row + i] = T(mul_rn(mul_rn(float(x[row + i]), scale), w[i]));
}
