// Sum of weights [T, CHOICES] times contributions [T, CHOICES, HIDDEN] in order of choice: f32 [T, HIDDEN].
const uint token = threadgroup_position_in_grid.y;
const uint column = threadgroup_position_in_grid.x * THREADS + thread_position_in_threadgroup.x;
if (column < HIDDEN) {
  float total = 0.0f;
  for (int j = 0; j < CHOICES; ++j) {
    const uint choice = token * CHOICES + j;
    const float weighted = mul_rn(weights[choice], contributions[ulong(choice) * HIDDEN + column]);
    total = j == 0 ? weighted : add_rn(total, weighted);
  }
  out[ulong(token) * HIDDEN + column] = total;
}
