// x [rows, WIDTH] * rsqrt(mean x^2 + eps[0]) * w [WIDTH], in x's type. A threadgroup a row.
TGMEM float parts[SIMDS];
const ulong row = ulong(threadgroup_position_in_grid.x) * WIDTH;
HeldRow<WIDTH, SIMDS> held;
#pragma unroll
for (int i = 0; i < (WIDTH / 4 + SIMDS * 32 - 1) / (SIMDS * 32); ++i) {
  const uint quad = thread_position_in_threadgroup.x + i * SIMDS * 32;
  held.v[i] = quad < WIDTH / 4 ? load4(x + row + 4 * quad) : quad_of(0.0f, 0.0f, 0.0f, 0.0f);
}
write_normed<WIDTH, SIMDS, T>(held, w, eps[0], out + row, parts, simdgroup_index_in_threadgroup,
                              thread_index_in_simdgroup);
