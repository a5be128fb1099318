// Metal's words in CUDA, and the functions of prelude_metal.h.
// CUDA's own headers spell __device__ as __attribute__((device)), which the macro below would break.
#undef __device__
#undef __constant__
#define __device__ __attribute__((__device__))
#define __constant__ __attribute__((__constant__))

#define device
#define constant
#define thread
#define threadgroup
#define TGMEM __shared__
#define FN __device__ __forceinline__

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef __half half;
typedef __nv_bfloat16 bfloat16_t;

#define threadgroup_position_in_grid blockIdx
#define threadgroups_per_grid gridDim
#define thread_position_in_threadgroup threadIdx
#define thread_index_in_simdgroup (threadIdx.x & 31u)
#define simdgroup_index_in_threadgroup (threadIdx.x >> 5)
#define threads_per_simdgroup warpSize

enum class mem_flags { mem_none, mem_threadgroup };
FN void threadgroup_barrier(mem_flags) { __syncthreads(); }
FN void simdgroup_barrier(mem_flags) { __syncwarp(); }

FN float mul_rn(float a, float b) { return __fmul_rn(a, b); }
FN float add_rn(float a, float b) { return __fadd_rn(a, b); }
FN float div_rn(float a, float b) { return __fdiv_rn(a, b); }
FN float exp_f32(float x) { return expf(x); }
FN float log_f32(float x) { return logf(x); }
FN float cos_f32(float x) { return cosf(x); }
FN float sin_f32(float x) { return sinf(x); }
FN float rsqrt_f32(float x) { return __fdiv_rn(1.0f, __fsqrt_rn(x)); }

FN float bits_to_float(uint bits) { return __uint_as_float(bits); }

FN float4 quad_of(float a, float b, float c, float d) { return make_float4(a, b, c, d); }
template <typename W>
FN float2 pair_of(uint bits) {
  return make_float2(bits_to_float(bits << 16), bits_to_float(bits & 0xFFFF0000u));
}
template <>
FN float2 pair_of<half>(uint bits) {
  return __half22float2(reinterpret_cast<const __half2&>(bits));
}
// The codes that `mask` leaves in the lower and in the upper half of a word, times CODE_UNIT. The lowest ten bits of a
// half are a denormal number, which converts exactly.
#define CODE_UNIT 0x1p-24f
FN float2 codes_at(uint word, uint mask) {
  // As assembly, so that a loop over tokens does not keep all of a row's numbers in registers.
  uint codes;
  asm("and.b32 %0, %1, %2;" : "=r"(codes) : "r"(word), "r"(mask | mask << 16));
  return pair_of<half>(codes);
}
FN float4 load4(const float* p) { return *(const float4*)p; }
FN float4 load4(const half* p) {
  const uint2 u = *(const uint2*)p;
  const float2 low = pair_of<half>(u.x), high = pair_of<half>(u.y);
  return make_float4(low.x, low.y, high.x, high.y);
}
FN float4 load4(const bfloat16_t* p) {
  const uint2 u = *(const uint2*)p;
  return make_float4(bits_to_float(u.x << 16), bits_to_float(u.x & 0xFFFF0000u), bits_to_float(u.y << 16),
                     bits_to_float(u.y & 0xFFFF0000u));
}

FN float from_lane_xor(float v, ushort mask) { return __shfl_xor_sync(~0u, v, mask); }
FN int from_lane_xor(int v, ushort mask) { return __shfl_xor_sync(~0u, v, mask); }
FN float from_lane(float v, ushort lane) { return __shfl_sync(~0u, v, lane); }
FN int from_lane(int v, ushort lane) { return __shfl_sync(~0u, v, lane); }
