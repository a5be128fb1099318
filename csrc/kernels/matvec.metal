// x [T, COLS] times w [N, COLS] transposed: [T, N] of type O. A threadgroup takes one row of x and TILES tiles of
// SIMDS * SPAN * ROWS rows of w.
constexpr int CHUNKS = COLS * BITS / 128;
constexpr int STEPS = CHUNKS / LANES;
constexpr int SPAN = 32 / LANES;
TGMEM float4 staged[(CHUNKS + 1) * (BITS < 32 ? 32 / BITS : 1)];
TGMEM float sums[CHUNKS];

const uint token = threadgroup_position_in_grid.y;
const uint lane = thread_index_in_simdgroup % LANES;
const device uint4* codes = (const device uint4*)w;
Row<STEPS> row[ROWS];
uint first = (threadgroup_position_in_grid.x * TILES * SIMDS + simdgroup_index_in_threadgroup) * SPAN * ROWS;
for (int tile = 0; tile < TILES; ++tile) {
  const uint here = first + thread_index_in_simdgroup / LANES;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const uint index = here + r * SPAN < N ? here + r * SPAN : N - 1;
    read_row<COLS, BITS, GROUP, LANES, STEPS>(row[r], codes, scales, biases, index, lane);
  }
  if (tile == 0) {
    stage<COLS, BITS, SIMDS * 32>(x + ulong(token) * COLS, staged, sums,
                                  simdgroup_index_in_threadgroup * 32 + thread_index_in_simdgroup);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const float value = lanes_sum<LANES>(row_dot<BITS, GROUP, LANES, CHUNKS, W>(row[r], staged, sums, 0, lane));
    if (lane == 0 && here + r * SPAN < N) out[ulong(token) * N + here + r * SPAN] = O(value);
  }
  first += SIMDS * SPAN * ROWS;
}
