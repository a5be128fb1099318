// A sum over all threads of a threadgroup of SIMDS SIMD-groups: butterflies, then the SIMD-groups in order.
template <int SIMDS>
FN float threadgroup_sum(float v, threadgroup float* parts, uint simdgroup, uint lane) {
  v = lanes_sum<32>(v);
  if (lane == 0) parts[simdgroup] = v;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float total = parts[0];
  for (int i = 1; i < SIMDS; ++i) total = add_rn(total, parts[i]);
  return total;
}
