// The two products of an expert, for texts that differ in where its rows lie and in what becomes of the results.

// Starts reading rows first, first + SPAN, ... of gate and of up, INTER rows each.
template <int HIDDEN, int INTER, int BITS, int GROUP, int LANES, int STEPS, int PAIRS, typename S>
FN void read_gate_up(thread Row<STEPS> (&gate_rows)[PAIRS], thread Row<STEPS> (&up_rows)[PAIRS],
                     const device uint4* gate, const device S* gate_scales, const device S* gate_biases,
                     const device uint4* up, const device S* up_scales, const device S* up_biases, uint first,
                     uint lane) {
#pragma unroll
  for (int p = 0; p < PAIRS; ++p) {
    const uint row = first + p * (32 / LANES) < INTER ? first + p * (32 / LANES) : INTER - 1;
    read_row<HIDDEN, BITS, GROUP, LANES, STEPS>(gate_rows[p], gate, gate_scales, gate_biases, row, lane);
    read_row<HIDDEN, BITS, GROUP, LANES, STEPS>(up_rows[p], up, up_scales, up_biases, row, lane);
  }
}

// gate . x and up . x, the same in each of a row's lanes.
template <int CHUNKS, int BITS, int GROUP, int LANES, int STEPS, int PAIRS>
FN void multiply_gate_up(thread float (&gate)[PAIRS], thread float (&up)[PAIRS],
                         const thread Row<STEPS> (&gate_rows)[PAIRS], const thread Row<STEPS> (&up_rows)[PAIRS],
                         const threadgroup float4* staged, const threadgroup float* sums, uint lane) {
#pragma unroll
  for (int p = 0; p < PAIRS; ++p) gate[p] = up[p] = 0.0f;
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    Chunk<BITS> chunk;
    read_staged<BITS, CHUNKS>(chunk, staged, sums, lane + step * LANES);
#pragma unroll
    for (int p = 0; p < PAIRS; ++p) {
      gate[p] = add_chunk<BITS, GROUP, uint>(gate_rows[p], step, chunk, gate[p]);
      up[p] = add_chunk<BITS, GROUP, uint>(up_rows[p], step, chunk, up[p]);
    }
  }
#pragma unroll
  for (int p = 0; p < PAIRS; ++p) {
    gate[p] = lanes_sum<LANES>(gate[p]);
    up[p] = lanes_sum<LANES>(up[p]);
  }
}

// Rows first, first + SPAN, ... of down [HIDDEN, INTER] times an activation written at laid_out.
template <int HIDDEN, int INTER, int BITS, int GROUP, int LANES, int ROWS, typename S>
FN void multiply_down(thread float (&sums)[ROWS], const device uint4* codes, const device S* scales,
                      const device S* biases, const device float* act, uint first, uint lane) {
  constexpr int CHUNKS = INTER * BITS / 128;
  constexpr int STEPS = CHUNKS / LANES;
  Row<STEPS> rows[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const uint row = first + r * (32 / LANES) < HIDDEN ? first + r * (32 / LANES) : HIDDEN - 1;
    read_row<INTER, BITS, GROUP, LANES, STEPS>(rows[r], codes, scales, biases, row, lane);
    sums[r] = 0.0f;
  }
  hold_loads();
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    Chunk<BITS> chunk;
    read_laid_out<BITS, CHUNKS>(chunk, (const device float4*)act, lane + step * LANES);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) sums[r] = add_chunk<BITS, GROUP, uint>(rows[r], step, chunk, sums[r]);
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r) sums[r] = lanes_sum<LANES>(sums[r]);
}
