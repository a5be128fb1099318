// Keys and values as they are kept: plain numbers, or words of 8-bit codes that stand for code * scale + bias.

template <typename T>
FN void read_eight(const device T* numbers, ulong at, float, float, thread float4& low, thread float4& high) {
  low = load4(numbers + at);
  high = load4(numbers + at + 4);
}

FN float4 from_codes(uint word, float scale, float bias) {
  const float second = mul_rn(scale, 0x1p-8f);
  return quad_of(fma(code_at(word, 0x00FFu), scale, bias), fma(code_at(word, 0xFF00u), second, bias),
                 fma(code_at(word >> 16, 0x00FFu), scale, bias), fma(code_at(word >> 16, 0xFF00u), second, bias));
}

FN void read_eight(const device uint* codes, ulong at, float scale, float bias, thread float4& low, thread float4& high) {
  const uint2 words = *(const device uint2*)(codes + at / 4);
  low = from_codes(words.x, scale, bias);
  high = from_codes(words.y, scale, bias);
}
