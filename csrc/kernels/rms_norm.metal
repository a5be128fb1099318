// x [rows, WIDTH] * rsqrt(mean x^2 + eps[0]) * w [WIDTH], in x's type. A threadgroup a row.
TGMEM float parts[SIMDS];
const ulong row = ulong(threadgroup_position_in_grid.x) * WIDTH;
const uint index = thread_position_in_threadgroup.x;
HeldRow<WIDTH, SIMDS> held, weight;
hold_row(held, x + row, index);
hold_row(weight, w, index);
const float square = threadgroup_sum<SIMDS>(row_square(held), parts, simdgroup_index_in_threadgroup,
                                            thread_index_in_simdgroup);
norm_row<T>(held, weight, square, eps[0]);
write_row(held, out + row, index);
