// total = x + y [rows, WIDTH], in x's type, and that as rms_norm.metal norms it. A threadgroup a row.
TGMEM float parts[SIMDS];
const ulong row = ulong(threadgroup_position_in_grid.x) * WIDTH;
const uint index = thread_position_in_threadgroup.x;
HeldRow<WIDTH, SIMDS> held, added, weight;
hold_row(held, x + row, index);
hold_row(added, y + row, index);
hold_row(weight, w, index);
add_row<T>(held, added);
write_row(held, total + row, index);
const float square = threadgroup_sum<SIMDS>(row_square(held), parts, simdgroup_index_in_threadgroup,
                                            thread_index_in_simdgroup);
norm_row<T>(held, weight, square, eps[0]);
write_row(held, normed + row, index);
