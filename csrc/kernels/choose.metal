// The choice of experts from logits [T, EXPERTS]; a SIMD-group a token.
TGMEM float ordered[CHOICES];
const ulong token = threadgroup_position_in_grid.x;
choose<EXPERTS, CHOICES>(logits + token * EXPERTS, ordered, ids + token * CHOICES, weights + token * CHOICES,
                         thread_index_in_simdgroup);
