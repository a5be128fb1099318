// Rows of w [w_rows, COLS] and then of v [v_rows, COLS], of one packing, times rows [begin, end) of x: w_out and v_out,
// [T, rows] each. `tile` counts the threadgroups, each of which takes SIMDS * 32 / LANES rows.
template <int COLS, int BITS, int GROUP, int LANES, int SIMDS, typename W, typename X, typename C, typename S, typename O>
FN void multiply_row_pair(const device X* x, const device C* w, const device S* w_scales, const device S* w_biases,
                          const device C* v, const device S* v_scales, const device S* v_biases, uint w_rows,
                          uint v_rows, uint tile, uint begin, uint end, uint simdgroup, uint lane_in_simdgroup,
                          threadgroup float4* staged, threadgroup float* sums, device O* w_out, device O* v_out) {
  constexpr int CHUNKS = COLS * BITS / 128;
  constexpr int STEPS = CHUNKS / LANES;
  constexpr int SPAN = 32 / LANES;
  const uint lane = lane_in_simdgroup % LANES;
  const uint row = (tile * SIMDS + simdgroup) * SPAN + lane_in_simdgroup / LANES;
  const uint index = row < w_rows + v_rows ? row : w_rows + v_rows - 1;
  const bool of_w = index < w_rows;
  Row<STEPS> weights;
  read_row<COLS, BITS, GROUP, LANES, STEPS>(weights, (const device uint4*)(of_w ? w : v), of_w ? w_scales : v_scales,
                                            of_w ? w_biases : v_biases, of_w ? index : index - w_rows, lane);
  for (uint token = begin; token < end; ++token) {
    if (token > begin) threadgroup_barrier(mem_flags::mem_threadgroup);
    stage<COLS, BITS, SIMDS * 32>(x + ulong(token) * COLS, staged, sums, simdgroup * 32 + lane_in_simdgroup);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float total = 0.0f;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      Chunk<BITS> chunk;
      read_staged<BITS, CHUNKS>(chunk, staged, sums, lane + step * LANES);
      total = add_chunk<BITS, GROUP, W>(weights, step, chunk, total);
    }
    total = lanes_sum<LANES>(total);
    if (lane == 0 && row < w_rows) w_out[ulong(token) * w_rows + row] = O(total);
    if (lane == 0 && row >= w_rows && row < w_rows + v_rows) v_out[ulong(token) * v_rows + row - w_rows] = O(total);
  }
}
