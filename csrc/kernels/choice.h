// Softmax over EXPERTS logits, the CHOICES most probable (ties to the lowest id) in ascending id, renormalised by a
// sum in that order. A logit that is NaN or +infinity makes all probabilities NaN: the lowest ids, weights of NaN.
// By one SIMD-group, whose lane l holds experts l, l + 32, ...
template <int EXPERTS, int CHOICES, typename L>
FN void choose(L logits, threadgroup float* ordered, device int* ids, device float* weights, int lane) {
  constexpr int HELD = (EXPERTS + 31) / 32;
  float p[HELD];
  const float none = bits_to_float(0xFF800000u);  // -infinity
  float top = none;
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    const int expert = lane + 32 * i;
    p[i] = expert < EXPERTS ? logits[expert] : none;
    top = p[i] > top ? p[i] : top;
  }
  top = lanes_max<32>(top);
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    p[i] = exp_f32(add_rn(p[i], -top));
    total = add_rn(total, p[i]);
  }
  total = lanes_sum<32>(total);
  // Where the total is NaN, zeros, which can be chosen, and whose weights are NaN again.
#pragma unroll
  for (int i = 0; i < HELD; ++i) {
    p[i] = lane + 32 * i < EXPERTS ? (total > 0.0f ? div_rn(p[i], total) : 0.0f) : -1.0f;
  }

  int mine = 0;
  float probability = 0.0f;
  for (int choice = 0; choice < CHOICES; ++choice) {
    float best = -1.0f;
    int id = EXPERTS;
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      if (p[i] > best) {
        best = p[i];
        id = lane + 32 * i;
      }
    }
    for (int mask = 1; mask < 32; mask *= 2) {
      const float other = from_lane_xor(best, mask);
      const int other_id = from_lane_xor(id, mask);
      if (other > best || (other == best && other_id < id)) {
        best = other;
        id = other_id;
      }
    }
#pragma unroll
    for (int i = 0; i < HELD; ++i) p[i] = id == lane + 32 * i ? -1.0f : p[i];
    mine = lane == choice ? id : mine;
    probability = lane == choice ? best : probability;
  }
  int rank = 0;
  for (int choice = 0; choice < CHOICES; ++choice) rank += from_lane(mine, choice) < mine ? 1 : 0;
  if (lane < CHOICES) ordered[rank] = probability;
  simdgroup_barrier(mem_flags::mem_threadgroup);
  if (lane < CHOICES) {
    float sum = ordered[0];
    for (int choice = 1; choice < CHOICES; ++choice) sum = add_rn(sum, ordered[choice]);
    ids[rank] = mine;
    weights[rank] = div_rn(probability, sum);
  }
}
