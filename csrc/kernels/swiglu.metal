// silu(gate) * up [rows, columns], number by number, rounded once to their type.
const uint i = threadgroup_position_in_grid.x * THREADS + thread_position_in_threadgroup.x;
if (i < uint(gate_shape[0] * gate_shape[1])) out[i] = T(swiglu(float(gate[i]), float(up[i])));
