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
