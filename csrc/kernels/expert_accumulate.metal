// acc [T, HIDDEN] plus weights [T, CHOICES] times contributions [T, CHOICES, WINDOW] of the leased choices, in order of
// choice, for the WINDOW channels from window[0] on: f32 [T, WINDOW].
const uint token = threadgroup_position_in_grid.y;
const uint column = threadgroup_position_in_grid.x * THREADS + thread_position_in_threadgroup.x;
if (column < WINDOW) {
  float total = acc[ulong(token) * HIDDEN + window[0] + column];
  for (int j = 0; j < CHOICES; ++j) {
    const uint choice = token * CHOICES + j;
    if (slot_of[rows[choice]] >= 0) {
      total = add_rn(total, mul_rn(weights[choice], contributions[ulong(choice) * WINDOW + column]));
    }
  }
  out[ulong(token) * WINDOW + column] = total;
}
