// As matvec_two.metal, bit for bit, for the packed w and v, and by the last threadgroups for the plain a_w and b_w.
constexpr int CHUNKS = COLS * BITS / 128, PLAIN_BITS = sizeof(A) * 8, PLAIN_CHUNKS = COLS * PLAIN_BITS / 128;
constexpr int STAGED = (CHUNKS + 1) * (32 / BITS), PLAIN_STAGED = (PLAIN_CHUNKS + 1) * (32 / PLAIN_BITS);
constexpr int ROWS_A_TILE = SIMDS * 32 / LANES;
TGMEM float4 staged[STAGED > PLAIN_STAGED ? STAGED : PLAIN_STAGED];
TGMEM float sums[CHUNKS > PLAIN_CHUNKS ? CHUNKS : PLAIN_CHUNKS];

const uint begin = threadgroup_position_in_grid.y * TOKENS, tokens = x_shape[0];
const uint end = begin + TOKENS < tokens ? begin + TOKENS : tokens;
const uint tile = threadgroup_position_in_grid.x;
const uint tiles = (w_shape[0] + v_shape[0] + ROWS_A_TILE - 1) / ROWS_A_TILE;
if (tile < tiles) {
  multiply_row_pair<COLS, BITS, GROUP, LANES, SIMDS, W>(x, w, w_scales, w_biases, v, v_scales, v_biases, w_shape[0],
                                                        v_shape[0], tile, begin, end, simdgroup_index_in_threadgroup,
                                                        thread_index_in_simdgroup, staged, sums, w_out, v_out);
} else {
  multiply_row_pair<COLS, PLAIN_BITS, 0, PLAIN_LANES, SIMDS, A>(x, a_w, a_w, a_w, b_w, b_w, b_w, a_w_shape[0],
                                                                b_w_shape[0], tile - tiles, begin, end,
                                                                simdgroup_index_in_threadgroup,
                                                                thread_index_in_simdgroup, staged, sums, a_out, b_out);
}
