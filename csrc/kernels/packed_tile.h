// A tile of rows of x times a tile of 64 packed weight rows, for prefill. Each product is one chain of fused
// multiply-adds over the columns in order, so its bits depend neither on the tile nor on the place in it.
//
// Four SIMD-groups hold ROWS x 64 results, ROWS / 8 x 4 a thread. Weights are read a line of 128 bytes a row at a time,
// as they are packed, and unpacked 32 columns at a time.

template <int ROWS, int BITS, int GROUP>
struct Tile {
  float4 x[ROWS][9];
  float2 w[32][32];
  uint4 codes[64][9];
  float scales[64][GROUP > 0 ? 1024 / BITS / (GROUP > 0 ? GROUP : 1) + 1 : 1];
  float biases[64][GROUP > 0 ? 1024 / BITS / (GROUP > 0 ? GROUP : 1) + 1 : 1];
};

// Weight row of a tile's column: two runs of 32, which may lie apart (gate and up rows).
struct Columns {
  uint low, low_end, high, high_end;
};

FN uint weight_row(const thread Columns& columns, uint column) {
  const uint row = column < 32 ? columns.low + column : columns.high + column - 32;
  const uint end = column < 32 ? columns.low_end : columns.high_end;
  return row < end ? row : end - 1;
}

template <int BITS, typename W>
FN float unpacked(uint word, int position, float scale, float bias) {
  if (BITS < 16) return fma(codes_at(word >> (position * BITS), (1u << (BITS & 15)) - 1u).x, scale, bias);
  if (BITS == 16) {
    const float2 pair = pair_of<W>(word);
    return position == 0 ? pair.x : pair.y;
  }
  return bits_to_float(word);
}

template <int ROWS, int BITS, int GROUP>
FN void multiply_tile(thread float (&sums)[ROWS / 8][4], const threadgroup Tile<ROWS, BITS, GROUP>& tile, uint thread_index) {
  const uint column = thread_index % 16;
  const uint row = thread_index / 16 * (ROWS / 8);
  for (int quad = 0; quad < 8; ++quad) {
    float4 x[ROWS / 8];
#pragma unroll
    for (int i = 0; i < ROWS / 8; ++i) x[i] = tile.x[row + i][quad];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const float2 low = tile.w[quad * 4 + k][column], high = tile.w[quad * 4 + k][column + 16];
#pragma unroll
      for (int i = 0; i < ROWS / 8; ++i) {
        const float v = k == 0 ? x[i].x : k == 1 ? x[i].y : k == 2 ? x[i].z : x[i].w;
        sums[i][0] = fma(v, low.x, sums[i][0]);
        sums[i][1] = fma(v, low.y, sums[i][1]);
        sums[i][2] = fma(v, high.x, sums[i][2]);
        sums[i][3] = fma(v, high.y, sums[i][3]);
      }
    }
  }
}

// sums += x[source[row]] . w[column] for the thread's rows and its columns 2 c, 2 c + 1, 32 + 2 c and 33 + 2 c, where
// c = thread_index % 16.
template <int ROWS, int COLS, int BITS, int GROUP, typename W, typename T, typename S>
FN void accumulate_tile(thread float (&sums)[ROWS / 8][4], const device T* x, const threadgroup uint* source,
                        const device uint4* codes, const device S* scales, const device S* biases, const thread Columns& columns,
                        threadgroup Tile<ROWS, BITS, GROUP>& tile, uint thread_index) {
  constexpr uint CHUNKS = COLS * BITS / 128;
  constexpr uint LINE_COLUMNS = 1024 / BITS;
  constexpr uint WORDS = BITS / 2;
  for (uint start = 0; start < COLS; start += LINE_COLUMNS) {
    for (uint i = thread_index; i < 64 * 8; i += 128) {
      const uint chunk = start * BITS / 128 + i % 8;
      if (chunk < CHUNKS) tile.codes[i / 8][i % 8] = codes[ulong(weight_row(columns, i / 8)) * CHUNKS + chunk];
    }
    if (GROUP > 0) {
      constexpr uint ALL = COLS / (GROUP > 0 ? GROUP : 1), HERE = LINE_COLUMNS / (GROUP > 0 ? GROUP : 1);
      for (uint i = thread_index; i < 64 * HERE; i += 128) {
        const uint group = start / (GROUP > 0 ? GROUP : 1) + i % HERE;
        if (group < ALL) {
          const ulong at = ulong(weight_row(columns, i / HERE)) * ALL + group;
          tile.scales[i / HERE][i % HERE] = mul_rn(float(scales[at]), 1.0f / CODE_UNIT);
          tile.biases[i / HERE][i % HERE] = float(biases[at]);
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint from = start; from < start + LINE_COLUMNS && from < COLS; from += 32) {
      for (uint i = thread_index; i < ROWS * 8; i += 128) {
        tile.x[i / 8][i % 8] = load4(x + ulong(source[i / 8]) * COLS + from + i % 8 * 4);
      }
      const uint column = thread_index % 64, first = thread_index / 64 * 16;
      const uint group = (from - start + first) / (GROUP > 0 ? GROUP : LINE_COLUMNS);
      const float scale = GROUP > 0 ? tile.scales[column][group] : 1.0f;
      const float bias = GROUP > 0 ? tile.biases[column][group] : 0.0f;
      const threadgroup uint* words = (const threadgroup uint*)tile.codes[column] + (from - start + first) * BITS / 32;
      threadgroup float* unpacked_column = (threadgroup float*)tile.w + first * 64 + column;
#pragma unroll
      for (uint word = 0; word < WORDS; ++word) {
        const uint packed = words[word];
#pragma unroll
        for (int position = 0; position < 32 / BITS; ++position) {
          unpacked_column[(word * (32 / BITS) + position) * 64] = unpacked<BITS, W>(packed, position, scale, bias);
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      multiply_tile<ROWS, BITS, GROUP>(sums, tile, thread_index);
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
  }
}
