// Dot products of packed weight rows with an activation staged in threadgroup memory.
//
// Sixteen bytes of a row are one chunk: 32 codes of 4 bits, 16 of 8, or 8 or 4 plain numbers. LANES neighbouring lanes
// share a row, each taking every LANES-th chunk, so that a SIMD-group reads whole lines.

template <int BITS>
FN float in_place_scale(int position) {
  // Codes are used as codes_at gives them; the activation carries the power of two that makes up for it.
  constexpr float ONE = 1.0f / CODE_UNIT;
  return BITS == 4 ? (position % 2 == 0 ? ONE : ONE * 0x1p-4f) : BITS == 8 ? ONE : 1.0f;
}

template <int LANES>
FN float lanes_sum(float v) {
  // An explicit butterfly: the same additions on every backend.
  for (int mask = 1; mask < LANES; mask *= 2) v = add_rn(v, from_lane_xor(v, mask));
  return v;
}

template <int LANES>
FN float lanes_max(float v) {
  for (int mask = 1; mask < LANES; mask *= 2) {
    const float other = from_lane_xor(v, mask);
    v = other > v ? other : v;
  }
  return v;
}

// The sum over LANES lanes of total[r], in lane r of them: as lanes_sum, but lanes share the rows among themselves.
template <int LANES, int ROWS>
FN float rows_sum(thread float (&total)[ROWS], uint lane) {
#pragma unroll
  for (int mask = 1; mask < LANES; mask *= 2) {
    if (mask < ROWS) {
#pragma unroll
      for (int r = 0; r < ROWS / (2 * mask); ++r) {
        const bool odd = lane & mask;
        const float kept = odd ? total[2 * r + 1] : total[2 * r];
        total[r] = add_rn(kept, from_lane_xor(odd ? total[2 * r] : total[2 * r + 1], mask));
      }
    } else {
      total[0] = add_rn(total[0], from_lane_xor(total[0], mask));
    }
  }
  return total[0];
}

// Four activations from channel 4 * i on, each times in_place_scale, to float4 [quad of a chunk][chunk], one chunk of
// padding a quad against bank conflicts, and the sum over each chunk. Lanes with consecutive i take part together.
template <int COLS, int BITS>
FN void stage_quad(float4 v, uint i, bool inside, threadgroup float4* staged, threadgroup float* sums) {
  constexpr int QUADS = 32 / BITS;
  constexpr int CHUNKS = COLS / 4 / QUADS;
  const float sum = lanes_sum<QUADS>(add_rn(add_rn(v.x, v.y), add_rn(v.z, v.w)));
  if (inside) {
    staged[i % QUADS * (CHUNKS + 1) + i / QUADS] =
        quad_of(mul_rn(v.x, in_place_scale<BITS>(0)), mul_rn(v.y, in_place_scale<BITS>(1)),
                mul_rn(v.z, in_place_scale<BITS>(2)), mul_rn(v.w, in_place_scale<BITS>(3)));
    if (i % QUADS == 0) sums[i / QUADS] = sum;
  }
}

// The activation x[COLS], by THREADS threads of which this is number `index`.
template <int COLS, int BITS, int THREADS, typename T>
FN void stage(const device T* x, threadgroup float4* staged, threadgroup float* sums, uint index) {
#pragma unroll
  for (int round = 0; round < (COLS / 4 + THREADS - 1) / THREADS; ++round) {
    const uint i = index + round * THREADS;
    const bool inside = COLS / 4 % THREADS == 0 || i < uint(COLS / 4);
    stage_quad<COLS, BITS>(inside ? load4(x + 4 * i) : quad_of(0.0f, 0.0f, 0.0f, 0.0f), i, inside, staged, sums);
  }
}

template <int STEPS>
struct Row {
  uint4 codes[STEPS];
  float scales[STEPS];
  float biases[STEPS];
};

// GROUP 0: plain numbers, which have no scales.
template <int COLS, int BITS, int GROUP, int LANES, int STEPS, typename S>
FN void read_row(thread Row<STEPS>& row, const device uint4* codes, const device S* scales, const device S* biases,
                 ulong index, uint lane) {
  constexpr uint CHUNKS = COLS * BITS / 128;
  constexpr uint CHUNKS_A_GROUP = GROUP > 0 ? GROUP * BITS / 128 : CHUNKS;
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    const uint chunk = lane + step * LANES;
    row.codes[step] = codes[index * CHUNKS + chunk];
    if (GROUP > 0) {
      const ulong group = index * (CHUNKS / CHUNKS_A_GROUP) + chunk / CHUNKS_A_GROUP;
      row.scales[step] = float(scales[group]);
      row.biases[step] = float(biases[group]);
    }
  }
}

// Compilers would move loads down to where their values are used; past this they do not.
FN void hold_loads() { simdgroup_barrier(mem_flags::mem_none); }

// Chunk number `lane` of the rows first, first + SPAN, ...
template <int COLS, int BITS, int GROUP, int LANES, int ROWS, typename S>
FN void read_rows(thread Row<1> (&row)[ROWS], const device uint4* codes, const device S* scales, const device S* biases,
                  ulong first, uint lane) {
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    read_row<COLS, BITS, GROUP, LANES, 1>(row[r], codes, scales, biases, first + r * (32 / LANES), lane);
  }
}

// A chunk's activations, four to a quad, and their sum before the codes' places were made up for.
template <int BITS>
struct Chunk {
  float4 x[32 / BITS];
  float sum;
};

// Adds the product of a chunk's word number `word` with its activations.
template <int BITS, typename W>
FN float dot_word(uint codes, const thread Chunk<BITS>& chunk, int word, float acc) {
  if (BITS == 4) {
    const float4 low = chunk.x[2 * word % (32 / BITS)], high = chunk.x[(2 * word + 1) % (32 / BITS)];
    const float2 first = codes_at(codes, 0x000Fu), second = codes_at(codes, 0x00F0u);
    const float2 third = codes_at(codes >> 8, 0x000Fu), fourth = codes_at(codes >> 8, 0x00F0u);
    acc = fma(fourth.x, low.w, fma(third.x, low.z, fma(second.x, low.y, fma(first.x, low.x, acc))));
    return fma(fourth.y, high.w, fma(third.y, high.z, fma(second.y, high.y, fma(first.y, high.x, acc))));
  }
  if (BITS == 8) {
    const float4 v = chunk.x[word % (32 / BITS)];
    const float2 even = codes_at(codes, 0x00FFu), odd = codes_at(codes >> 8, 0x00FFu);
    return fma(odd.y, v.w, fma(even.y, v.z, fma(odd.x, v.y, fma(even.x, v.x, acc))));
  }
  if (BITS == 16) {
    const float4 v = chunk.x[word / 2 % (32 / BITS)];
    const float2 w = pair_of<W>(codes);
    acc = fma(w.x, word % 2 == 0 ? v.x : v.z, acc);
    return fma(w.y, word % 2 == 0 ? v.y : v.w, acc);
  }
  const float4 v = chunk.x[0];
  return fma(bits_to_float(codes), word == 0 ? v.x : word == 1 ? v.y : word == 2 ? v.z : v.w, acc);
}

// Adds the product of a row's chunk number `step` of this lane.
template <int BITS, int GROUP, typename W, int STEPS>
FN float add_chunk(const thread Row<STEPS>& row, int step, const thread Chunk<BITS>& chunk, float total) {
  float dot = GROUP > 0 ? 0.0f : total;
  dot = dot_word<BITS, W>(row.codes[step].x, chunk, 0, dot);
  dot = dot_word<BITS, W>(row.codes[step].y, chunk, 1, dot);
  dot = dot_word<BITS, W>(row.codes[step].z, chunk, 2, dot);
  dot = dot_word<BITS, W>(row.codes[step].w, chunk, 3, dot);
  return GROUP > 0 ? fma(row.scales[step], dot, fma(row.biases[step], chunk.sum, total)) : dot;
}

// The activations that `stage` put at chunk number `index` of CHUNKS.
template <int BITS, int CHUNKS>
FN void read_staged(thread Chunk<BITS>& chunk, const threadgroup float4* staged, const threadgroup float* sums,
                    uint index) {
#pragma unroll
  for (int quad = 0; quad < 32 / BITS; ++quad) chunk.x[quad] = staged[quad * (CHUNKS + 1) + index];
  chunk.sum = BITS < 16 ? sums[index] : 0.0f;
}

// Where channel i of an activation lies that is written in the order in which read_laid_out reads it.
template <int BITS, int CHUNKS>
FN uint laid_out(uint i) {
  constexpr uint COLUMNS = 128 / BITS;
  return (i % COLUMNS / 4 * CHUNKS + i / COLUMNS) * 4 + i % 4;
}

// Chunk number `index` of CHUNKS, written channel by channel at laid_out, times in_place_scale. Its sum is added up as
// `stage` adds it up.
template <int BITS, int CHUNKS>
FN void read_laid_out(thread Chunk<BITS>& chunk, const device float4* x, uint index) {
  constexpr int QUADS = 32 / BITS;
  float sums[QUADS];
#pragma unroll
  for (int quad = 0; quad < QUADS; ++quad) {
    const float4 v = x[quad * CHUNKS + index];
    chunk.x[quad] = v;
    const float low = fma(v.y, 1.0f / in_place_scale<BITS>(1), mul_rn(v.x, 1.0f / in_place_scale<BITS>(0)));
    const float high = fma(v.w, 1.0f / in_place_scale<BITS>(3), mul_rn(v.z, 1.0f / in_place_scale<BITS>(2)));
    sums[quad] = add_rn(low, high);
  }
#pragma unroll
  for (int apart = 1; apart < QUADS; apart *= 2) {
#pragma unroll
    for (int quad = 0; quad + apart < QUADS; quad += 2 * apart) sums[quad] = add_rn(sums[quad], sums[quad + apart]);
  }
  chunk.sum = sums[0];
}

// Chunk number `index` of plain numbers.
template <int BITS, typename T>
FN void read_plain(thread Chunk<BITS>& chunk, const device T* x, uint index) {
#pragma unroll
  for (int quad = 0; quad < 32 / BITS; ++quad) chunk.x[quad] = load4(x + index * (128 / BITS) + 4 * quad);
  chunk.sum = 0.0f;
}
