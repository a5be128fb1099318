// As matvec.metal, bit for bit, for two matrices of one packing.
constexpr int CHUNKS = COLS * BITS / 128;
TGMEM float4 staged[(CHUNKS + 1) * (32 / BITS)];
TGMEM float sums[CHUNKS];

const uint begin = threadgroup_position_in_grid.y * TOKENS, tokens = x_shape[0];
const uint end = begin + TOKENS < tokens ? begin + TOKENS : tokens;
multiply_row_pair<COLS, BITS, GROUP, LANES, SIMDS, W>(x, w, w_scales, w_biases, v, v_scales, v_biases, w_shape[0],
                                                      v_shape[0], threadgroup_position_in_grid.x, begin, end,
                                                      simdgroup_index_in_threadgroup, thread_index_in_simdgroup,
                                                      staged, sums, w_out, v_out);
