// What the kernel texts need beyond Metal itself; prelude_cuda.h says the same in CUDA.
#pragma METAL fp contract(off)

#define FN inline
#define TGMEM threadgroup

FN float mul_rn(float a, float b) { return a * b; }
FN float add_rn(float a, float b) { return a + b; }
FN float div_rn(float a, float b) { return metal::precise::divide(a, b); }
FN float exp_f32(float x) { return metal::precise::exp(x); }
FN float log_f32(float x) { return metal::precise::log(x); }
FN float cos_f32(float x) { return metal::precise::cos(x); }
FN float sin_f32(float x) { return metal::precise::sin(x); }
FN float rsqrt_f32(float x) { return div_rn(1.0f, metal::precise::sqrt(x)); }

FN float bits_to_float(uint bits) { return as_type<float>(bits); }
// 2^23 + n has n in its lowest bits, so a code masked into that number, less 2^23, is converted exactly.
#define CODE_UNIT 1.0f
FN float code_at(uint word, uint mask) { return bits_to_float((word & mask) | 0x4B000000u) - 8388608.0f; }
FN float2 codes_at(uint word, uint mask) { return float2(code_at(word, mask), code_at(word >> 16, mask)); }

FN float4 quad_of(float a, float b, float c, float d) { return float4(a, b, c, d); }
FN float4 load4(const device float* p) { return *(const device float4*)p; }
FN float4 load4(const device half* p) { return float4(*(const device half4*)p); }
FN float4 load4(const device bfloat16_t* p) {
  const uint2 u = *(const device uint2*)p;
  return float4(bits_to_float(u.x << 16), bits_to_float(u.x & 0xFFFF0000u), bits_to_float(u.y << 16),
                bits_to_float(u.y & 0xFFFF0000u));
}
template <typename W> FN float2 pair_of(uint bits) { return float2(bits_to_float(bits << 16), bits_to_float(bits & 0xFFFF0000u)); }
template <> inline float2 pair_of<half>(uint bits) { return float2(as_type<half2>(bits)); }

FN float from_lane_xor(float v, ushort mask) { return simd_shuffle_xor(v, mask); }
FN int from_lane_xor(int v, ushort mask) { return simd_shuffle_xor(v, mask); }
FN float from_lane(float v, ushort lane) { return simd_shuffle(v, lane); }
FN int from_lane(int v, ushort lane) { return simd_shuffle(v, lane); }
