// A row of WIDTH numbers, four to a load, in the registers of SIMDS SIMD-groups: thread `index` of them holds quads
// index, index + SIMDS * 32, ...
template <int WIDTH, int SIMDS>
struct HeldRow {
  float4 v[(WIDTH / 4 + SIMDS * 32 - 1) / (SIMDS * 32)];
};

template <int WIDTH, int SIMDS, typename T>
FN void hold_row(thread HeldRow<WIDTH, SIMDS>& row, const device T* x, uint index) {
  constexpr int HELD = sizeof(row) / sizeof(float4);
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    const uint quad = index + i * SIMDS * 32;
    row.v[i] = quad < WIDTH / 4 ? load4(x + 4 * quad) : quad_of(0.0f, 0.0f, 0.0f, 0.0f);
  }
}

template <int WIDTH, int SIMDS, typename T>
FN void write_row(const thread HeldRow<WIDTH, SIMDS>& row, device T* out, uint index) {
  constexpr int HELD = sizeof(row) / sizeof(float4);
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    const uint quad = index + i * SIMDS * 32;
    if (quad < WIDTH / 4) {
      out[4 * quad] = T(row.v[i].x);
      out[4 * quad + 1] = T(row.v[i].y);
      out[4 * quad + 2] = T(row.v[i].z);
      out[4 * quad + 3] = T(row.v[i].w);
    }
  }
}

// row += other, rounded to T.
template <typename T, int WIDTH, int SIMDS>
FN void add_row(thread HeldRow<WIDTH, SIMDS>& row, const thread HeldRow<WIDTH, SIMDS>& other) {
  constexpr int HELD = sizeof(row) / sizeof(float4);
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    row.v[i] = quad_of(float(T(add_rn(row.v[i].x, other.v[i].x))), float(T(add_rn(row.v[i].y, other.v[i].y))),
                       float(T(add_rn(row.v[i].z, other.v[i].z))), float(T(add_rn(row.v[i].w, other.v[i].w))));
  }
}

// This thread's part of the sum of squares.
template <int WIDTH, int SIMDS>
FN float row_square(const thread HeldRow<WIDTH, SIMDS>& row) {
  constexpr int HELD = sizeof(row) / sizeof(float4);
  float square = 0.0f;
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    square = fma(row.v[i].x, row.v[i].x, square);
    square = fma(row.v[i].y, row.v[i].y, square);
    square = fma(row.v[i].z, row.v[i].z, square);
    square = fma(row.v[i].w, row.v[i].w, square);
  }
  return square;
}

// row * rsqrt(mean square + eps) * w, rounded to T. `square` is the sum over all threads.
template <typename T, int WIDTH, int SIMDS>
FN void norm_row(thread HeldRow<WIDTH, SIMDS>& row, const thread HeldRow<WIDTH, SIMDS>& w, float square, float eps) {
  constexpr int HELD = sizeof(row) / sizeof(float4);
  const float scale = rsqrt_f32(add_rn(div_rn(square, float(WIDTH)), eps));
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    row.v[i] = quad_of(
        float(T(mul_rn(mul_rn(row.v[i].x, scale), w.v[i].x))), float(T(mul_rn(mul_rn(row.v[i].y, scale), w.v[i].y))),
        float(T(mul_rn(mul_rn(row.v[i].z, scale), w.v[i].z))), float(T(mul_rn(mul_rn(row.v[i].w, scale), w.v[i].w))));
  }
}

// As `stage` stages x, from what is held.
template <int BITS, int WIDTH, int SIMDS>
FN void stage_row(const thread HeldRow<WIDTH, SIMDS>& row, threadgroup float4* staged, threadgroup float* sums,
                  uint index) {
  constexpr int HELD = sizeof(row) / sizeof(float4);
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    const uint quad = index + i * SIMDS * 32;
    stage_quad<WIDTH, BITS>(row.v[i], quad, quad < WIDTH / 4, staged, sums);
  }
}
