// total = x + y [rows, WIDTH], in x's type, and that as rms_norm.metal norms it. A threadgroup a row.
TGMEM float parts[SIMDS];
const ulong row = ulong(threadgroup_position_in_grid.x) * WIDTH;
HeldRow<WIDTH, SIMDS> held;
#pragma unroll
for (int i = 0; i < (WIDTH / 4 + SIMDS * 32 - 1) / (SIMDS * 32); ++i) {
  const uint quad = thread_position_in_threadgroup.x + i * SIMDS * 32;
  held.v[i] = quad_of(0.0f, 0.0f, 0.0f, 0.0f);
  if (quad < WIDTH / 4) {
    const float4 a = load4(x + row + 4 * quad), b = load4(y + row + 4 * quad);
    held.v[i] = quad_of(float(T(add_rn(a.x, b.x))), float(T(add_rn(a.y, b.y))), float(T(add_rn(a.z, b.z))),
                        float(T(add_rn(a.w, b.w))));
    total[row + 4 * quad] = T(held.v[i].x);
    total[row + 4 * quad + 1] = T(held.v[i].y);
    total[row + 4 * quad + 2] = T(held.v[i].z);
    total[row + 4 * quad + 3] = T(held.v[i].w);
  }
}
write_normed<WIDTH, SIMDS, T>(held, w, eps[0], normed + row, parts, simdgroup_index_in_threadgroup,
                              thread_index_in_simdgroup);
