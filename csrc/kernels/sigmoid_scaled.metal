// sigmoid(scale [rows]) times each row of x [rows, WIDTH], in f32.
const uint column = threadgroup_position_in_grid.x * THREADS + thread_position_in_threadgroup.x;
const uint row = threadgroup_position_in_grid.y;
if (column < WIDTH) {
  const float gate = sigmoid(float(scale[row]));
  out[ulong(row) * WIDTH + column] = mul_rn(gate, float(x[ulong(row) * WIDTH + column]));
}
