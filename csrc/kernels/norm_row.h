// A row of WIDTH numbers, four to a load, in the registers of a threadgroup of SIMDS SIMD-groups.
template <int WIDTH, int SIMDS>
struct HeldRow {
  float4 v[(WIDTH / 4 + SIMDS * 32 - 1) / (SIMDS * 32)];
};

// out = row * rsqrt(mean row^2 + eps) * w, each of type T.
template <int WIDTH, int SIMDS, typename T>
FN void write_normed(const thread HeldRow<WIDTH, SIMDS>& row, const device float* w, float eps, device T* out,
                     threadgroup float* parts, uint simdgroup, uint lane) {
  constexpr int HELD = (WIDTH / 4 + SIMDS * 32 - 1) / (SIMDS * 32);
  float4 weight[HELD];
  float square = 0.0f;
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    const uint quad = simdgroup * 32 + lane + i * SIMDS * 32;
    weight[i] = quad < WIDTH / 4 ? load4(w + 4 * quad) : quad_of(0.0f, 0.0f, 0.0f, 0.0f);
    square = fma(row.v[i].x, row.v[i].x, square);
    square = fma(row.v[i].y, row.v[i].y, square);
    square = fma(row.v[i].z, row.v[i].z, square);
    square = fma(row.v[i].w, row.v[i].w, square);
  }
  square = threadgroup_sum<SIMDS>(square, parts, simdgroup, lane);
  const float scale = rsqrt_f32(add_rn(div_rn(square, float(WIDTH)), eps));
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    const uint quad = simdgroup * 32 + lane + i * SIMDS * 32;
    if (quad < WIDTH / 4) {
      out[4 * quad] = T(mul_rn(mul_rn(row.v[i].x, scale), weight[i].x));
      out[4 * quad + 1] = T(mul_rn(mul_rn(row.v[i].y, scale), weight[i].y));
      out[4 * quad + 2] = T(mul_rn(mul_rn(row.v[i].z, scale), weight[i].z));
      out[4 * quad + 3] = T(mul_rn(mul_rn(row.v[i].w, scale), weight[i].w));
    }
  }
}
