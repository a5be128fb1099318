// Keys and values as they are kept: plain numbers, or words of 8-bit codes that stand for code * scale + bias.

template <typename T>
FN void read_eight(const device T* numbers, ulong at, float, float, thread float4& low, thread float4& high) {
  low = load4(numbers + at);
  high = load4(numbers + at + 4);
}

FN float4 from_codes(uint word, float scale, float bias) {
  const float2 even = codes_at(word, 0x00FFu), odd = codes_at(word >> 8, 0x00FFu);
  const float unit = mul_rn(scale, 1.0f / CODE_UNIT);
  return quad_of(fma(even.x, unit, bias), fma(odd.x, unit, bias), fma(even.y, unit, bias), fma(odd.y, unit, bias));
}

FN void read_eight(const device uint* codes, ulong at, float scale, float bias, thread float4& low, thread float4& high) {
  const uint2 words = *(const device uint2*)(codes + at / 4);
  low = from_codes(words.x, scale, bias);
  high = from_codes(words.y, scale, bias);
}

// Eight neighbouring numbers from number `at` on. GROUP 0: plain ones, which have no scales.
template <int GROUP, typename C, typename S>
FN void read_kept(const device C* kept, const device S* scales, const device S* biases, ulong at, thread float4& low,
                  thread float4& high) {
  const ulong group = at / (GROUP > 0 ? GROUP : 1);
  read_eight(kept, at, GROUP > 0 ? float(scales[group]) : 1.0f, GROUP > 0 ? float(biases[group]) : 0.0f, low, high);
}

FN float dot_eight(float4 q_low, float4 q_high, float4 k_low, float4 k_high) {
  float dot = mul_rn(q_low.x, k_low.x);
  dot = fma(q_low.y, k_low.y, dot);
  dot = fma(q_low.z, k_low.z, dot);
  dot = fma(q_low.w, k_low.w, dot);
  dot = fma(q_high.x, k_high.x, dot);
  dot = fma(q_high.y, k_high.y, dot);
  dot = fma(q_high.z, k_high.z, dot);
  return fma(q_high.w, k_high.w, dot);
}

FN void add_eight(thread float (&sum)[8], float weight, float4 v_low, float4 v_high) {
  sum[0] = fma(weight, v_low.x, sum[0]);
  sum[1] = fma(weight, v_low.y, sum[1]);
  sum[2] = fma(weight, v_low.z, sum[2]);
  sum[3] = fma(weight, v_low.w, sum[3]);
  sum[4] = fma(weight, v_high.x, sum[4]);
  sum[5] = fma(weight, v_high.y, sum[5]);
  sum[6] = fma(weight, v_high.z, sum[6]);
  sum[7] = fma(weight, v_high.w, sum[7]);
}
