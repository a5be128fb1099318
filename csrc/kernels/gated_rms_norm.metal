// Each row x [rows, WIDTH] f32 * rsqrt(mean x^2 + eps[0]) * w [WIDTH] * silu(z [rows, WIDTH]), in z's type. A
// SIMD-group a row.
const uint row = threadgroup_position_in_grid.x * SIMDS + simdgroup_index_in_threadgroup;
const uint last = z_shape[0] * z_shape[1] - 1;
const ulong at = ulong(row < last ? row : last) * WIDTH + thread_index_in_simdgroup;
float square = 0.0f;
for (int i = 0; i < WIDTH; i += 32) square = fma(x[at + i], x[at + i], square);
const float scale = rsqrt_f32(add_rn(div_rn(lanes_sum<32>(square), float(WIDTH)), eps[0]));
if (row <= last) {
  for (int i = 0; i < WIDTH; i += 32) {
    const float gate = swiglu(float(z[at + i]), 1.0f);
    out[at + i] = T(mul_rn(mul_rn(mul_rn(x[at + i], scale), w[thread_index_in_simdgroup + i]), gate));
  }
}
