// Causal grouped-query attention. Keys are taken in segments aligned to position 0 whose results are merged in
// ascending order, so a query's bits depend on nothing but the query, its keys and their positions.
#pragma once

#include "kept_rows.h"

namespace ttd {

struct Attention {
  int64_t tokens, heads, key_heads, head_dim;
  int64_t offset;    // position of the first query, which sees that many keys before its own
  int64_t capacity;  // keys there is room for in a head
  float scale;
  Type type;
  const void* q;  // [tokens, heads, head_dim]
  Type gate_type;
  const void* gate;  // [tokens, heads, head_dim], or null
  KeptRows keys, values;  // [key_heads, capacity, head_dim], of one form
  void* out;                  // [tokens, heads, head_dim]
};

void attention(const Attention& call);

}  // namespace ttd

#ifdef TTD_OPERATIONS
namespace ttd::TTD_ISA {

constexpr int64_t segment_keys = 256;  // keys whose softmax is taken at once
constexpr int64_t near_keys = 32;      // keys that all queries visit while their lines are near
constexpr int64_t most_queries = 96;   // queries of a key head that share a visit
constexpr int64_t few_queries = 16;    // queries that read keys as they are kept; for more these are first made floats

// Rows that were made floats, and lie near.
struct Panel : Numbers<float> {
  using Numbers::Numbers;
  void ask_for(int64_t, int64_t) const {}
};

// Tiles whose sums fit the registers; where rows have to be made floats each time, all queries of a key head together.
#if defined(__AVX512F__)
template <class Rows>
constexpr int score_queries = std::is_same_v<Rows, Panel> ? 6 : 8;
template <class Rows>
constexpr int score_keys = std::is_same_v<Rows, Panel> ? 4 : 2;
constexpr int value_queries = 8, value_columns = 2;
#else
template <class Rows>
constexpr int score_queries = 2;
template <class Rows>
constexpr int score_keys = 4;
constexpr int value_queries = 4, value_columns = 1;
#endif

// For each of some queries: its largest score, the sum of its exponentials, and the values weighted by them.
struct Partial {
  float *top, *total, *values;  // [queries], [queries], [queries, width]

  Partial(float* memory, int64_t queries) : top(memory), total(memory + queries), values(memory + round_up(2 * queries)) {}
  static int64_t size(int64_t queries, int64_t width) { return round_up(2 * queries) + queries * width; }
};

// `count` rows as floats.
template <class Rows>
static inline Panel unpacked(const Rows& rows, int64_t count, int64_t width) {
  float* out = scratch<float>(Scratch::panel, near_keys * width);
  for (int64_t row = 0; row < count; ++row)
    over_sixteens(rows.dim, [&](int64_t i, int64_t n) {
      rows.ask_for(near_keys + row, i);
      store(out + row * width + i, rows.at(row, i, n));
    });
  return {out, width};
}

// Products of R queries and K keys from `key` on: scores [R][segment_keys].
template <int R, int K, class Rows>
static inline void score(const float* const* q, const Rows& keys, int64_t key, float* scores) {
  Floats lanes[R][K];
  for (int r = 0; r < R; ++r)
    for (int k = 0; k < K; ++k) lanes[r][k] = splat(0.0f);
  over_sixteens(keys.dim, [&](int64_t i, int64_t n) {
    Floats at[K];
    for (int k = 0; k < K; ++k) {
      keys.ask_for(near_keys + key + k, i);
      at[k] = keys.at(key + k, i, n);
    }
    for (int r = 0; r < R; ++r) {
      const Floats query = load(q[r] + i);
      for (int k = 0; k < K; ++k) lanes[r][k] = fma(query, at[k], lanes[r][k]);
    }
  });
  float sums[R * K];
  sum_each<R * K>(&lanes[0][0], sums);
  for (int r = 0; r < R; ++r)
    for (int k = 0; k < K; ++k) scores[r * segment_keys + k] = sums[r * K + k];
}

// R queries' weights [R][segment_keys] times `channels`, up to 16 C, of `keys` values, added to out [R][width].
template <int R, int C, class Rows>
static inline void add_values(const float* weights, const Rows& values, int64_t keys, int64_t channel, int64_t channels, float* out,
                              int64_t width) {
  Floats lanes[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) lanes[r][c] = load(out + r * width + channel + 16 * c);
  for (int64_t key = 0; key < keys; ++key) {
    Floats value[C];
    for (int c = 0; c < C; ++c) {
      values.ask_for(near_keys + key, channel + 16 * c);
      value[c] = values.at(key, channel + 16 * c, channels - 16 * c);
    }
    for (int r = 0; r < R; ++r) {
      const Floats weight = splat(weights[r * segment_keys + key]);
      for (int c = 0; c < C; ++c) lanes[r][c] = fma(weight, value[c], lanes[r][c]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) store(out + r * width + channel + 16 * c, lanes[r][c]);
}

template <int R, class Rows>
static inline void add_all_values(const float* weights, const Rows& values, int64_t keys, float* out, int64_t width) {
  int64_t c = 0;
  for (; c + 16 * value_columns <= values.dim; c += 16 * value_columns)
    add_values<R, value_columns>(weights, values, keys, c, 16 * value_columns, out, width);
  for (; c < values.dim; c += 16) add_values<R, 1>(weights, values, keys, c, smaller(16, values.dim - c), out, width);
}

// Turns scores [keys] of one query into exp(score - top).
static inline void exponentials(float* scores, int64_t keys, float* top, float* total) {
  Floats largest_lanes = splat(scores[0]);
  over_sixteens(keys, [&](int64_t i, int64_t n) {
    if (n == 16) largest_lanes = max(largest_lanes, load(scores + i));
  });
  float most = largest(largest_lanes);
  for (int64_t key = keys / 16 * 16; key < keys; ++key) most = scores[key] > most ? scores[key] : most;
  Floats lanes = splat(0.0f);
  over_sixteens(keys, [&](int64_t i, int64_t n) {
    const Floats value = exp(load_upto(scores + i, n) - splat(most));
    store_upto(scores + i, value, n);
    lanes = lanes + load_upto(scores + i, n);
  });
  *top = most;
  *total = sum(lanes);
}

// f(rows, near, count) for the rows [first, first + all) near by near, made floats where many queries read them.
template <class Rows, class F>
static inline void over_near_rows(const KeptRows& kept, int64_t first, int64_t all, int64_t queries, int64_t dim, F&& f) {
  for (int64_t near = 0; near < all; near += near_keys) {
    const int64_t count = smaller(near_keys, all - near);
    const Rows rows(kept, first + near, count, dim);
    if (queries > few_queries)
      f(unpacked(rows, count, round_up(dim)), near, count);
    else
      f(rows, near, count);
  }
}

// A segment's part of the result for `tokens` tokens from `token` on and the heads that share one key head.
template <class Rows>
static inline void attend_segment(const Attention& call, int64_t key_head, int64_t token, int64_t tokens, int64_t segment,
                                  const float* const* x, Partial out, int64_t width) {
  const int64_t group = call.heads / call.key_heads, first = segment * segment_keys;
  const int64_t queries = tokens * group, dim = call.head_dim;
  const int64_t last = call.offset + token + tokens;  // one past the last key that any of these sees
  const int64_t keys = smaller(segment_keys, last - first), row = key_head * call.capacity + first;
  float* scores = scratch<float>(Scratch::hidden, queries * segment_keys);
  over_near_rows<Rows>(call.keys, row, keys, queries, dim, [&]<class Near>(const Near& rows, int64_t near, int64_t count) {
    over_tiles_of<score_queries<Near>>(queries, [&](int64_t q, auto R) {
      over_tiles_of<score_keys<Near>>(count, [&](int64_t k, auto K) {
        score<R, K>(x + q, rows, k, scores + q * segment_keys + near + k);
      });
    });
  });
  std::memset(out.values, 0, static_cast<size_t>(queries * width) * sizeof(float));
  const auto seen = [&](int64_t t) { return smaller(keys, call.offset + token + t + 1 - first); };
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t q = t * group; seen(t) > 0 && q < (t + 1) * group; ++q)
      exponentials(scores + q * segment_keys, seen(t), out.top + q, out.total + q);
  over_near_rows<Rows>(call.values, row, keys, queries, dim, [&](const auto& rows, int64_t near, int64_t count) {
    for (int64_t t = 0; t < tokens; ++t)
      if (near < seen(t))
        over_tiles_of<value_queries>(group, [&](int64_t h, auto R) {
          const int64_t q = t * group + h;
          add_all_values<R>(scores + q * segment_keys + near, rows, smaller(count, seen(t) - near), out.values + q * width, width);
        });
  });
}

// Adds a segment's part of query q to that of the segments before it.
static inline void merge(Partial sum, Partial part, int64_t q, int64_t width) {
  const float most = sum.top[q] > part.top[q] ? sum.top[q] : part.top[q];
  const Floats mine = exp(splat(sum.top[q] - most)), theirs = exp(splat(part.top[q] - most));
  float total[16];
  store(total, fma(theirs, splat(part.total[q]), mine * splat(sum.total[q])));
  sum.total[q] = total[0];
  sum.top[q] = most;
  float* to = sum.values + q * width;
  for (int64_t i = 0; i < width; i += 16) store(to + i, fma(theirs, load(part.values + q * width + i), mine * load(to + i)));
}

// values / total, times sigmoid(gate), of one query.
static inline void finish(const Attention& call, int64_t token, int64_t head, float total, const float* values) {
  const int64_t at = (token * call.heads + head) * call.head_dim;
  with_type(call.type, [&](auto* kind) {
    with_type(call.gate_type, [&](auto* gate_kind) {
      auto* out = static_cast<decltype(kind)>(call.out) + at;
      const auto* gate = static_cast<decltype(gate_kind)>(const_cast<void*>(call.gate));
      over_sixteens(call.head_dim, [&](int64_t i, int64_t n) {
        Floats value = load(values + i) / splat(total);
        if (gate) value = value * sigmoid(load_upto(gate + at + i, n));
        store_upto(out + i, value, n);
      });
    });
  });
}

// The scaled queries of some tokens and one key head's group, in the order that `multiply` reads.
static inline void lay_out_queries(const Attention& call, int64_t key_head, int64_t token, int64_t tokens, float* rows,
                                   const float** at, int64_t width) {
  const int64_t group = call.heads / call.key_heads;
  for (int64_t i = 0; i < tokens * group; ++i) {
    const int64_t query = (token + i / group) * call.heads + key_head * group + i % group;
    at[i] = rows + i * width;
    with_type(call.type, [&](auto* kind) {
      const auto* from = static_cast<decltype(kind)>(const_cast<void*>(call.q)) + query * call.head_dim;
      over_sixteens(call.head_dim, [&](int64_t c, int64_t n) {
        store(rows + i * width + c, load_upto(from + c, n) * splat(call.scale));
      });
    });
  }
}

// Few queries: the segments are shared out, then merged query by query.
template <class Rows>
static inline void attend_by_segment(const Attention& call) {
  const int64_t group = call.heads / call.key_heads, queries = call.tokens * group;
  const int64_t width = round_up(call.head_dim);
  const int64_t segments = (call.offset + call.tokens + segment_keys - 1) / segment_keys;
  float* rows = scratch<float>(Scratch::inputs, call.key_heads * queries * width);
  const float** x = scratch<const float*>(Scratch::pointers, call.key_heads * queries);
  for (int64_t h = 0; h < call.key_heads; ++h)
    lay_out_queries(call, h, 0, call.tokens, rows + h * queries * width, x + h * queries, width);
  const int64_t size = Partial::size(queries, width);
  float* memory = scratch<float>(Scratch::state, call.key_heads * segments * size);
  parallel_for(call.key_heads * segments, [&](int64_t chunk) {
    const int64_t h = chunk / segments;
    attend_segment<Rows>(call, h, 0, call.tokens, chunk % segments, x + h * queries, Partial(memory + chunk * size, queries), width);
  });
  parallel_for(call.key_heads * queries, [&](int64_t chunk) {
    const int64_t h = chunk / queries, q = chunk % queries, token = q / group;
    const Partial sum(memory + h * segments * size, queries);
    for (int64_t s = 1; s * segment_keys <= call.offset + token; ++s)
      merge(sum, Partial(memory + (h * segments + s) * size, queries), q, width);
    finish(call, token, h * group + q % group, sum.total[q], sum.values + q * width);
  });
}

// Many queries: blocks of them are shared out, each going through its segments in order.
template <class Rows>
static inline void attend_by_query(const Attention& call) {
  const int64_t group = call.heads / call.key_heads, width = round_up(call.head_dim);
  const int64_t together = group < most_queries ? most_queries / group : 1;
  const int64_t blocks = (call.tokens + together - 1) / together;
  parallel_for(call.key_heads * blocks, [&](int64_t chunk) {
    const int64_t h = chunk / blocks, token = (blocks - 1 - chunk % blocks) * together;
    const int64_t tokens = call.tokens - token < together ? call.tokens - token : together, queries = tokens * group;
    float* rows = scratch<float>(Scratch::inputs, queries * width);
    const float** x = scratch<const float*>(Scratch::pointers, queries);
    lay_out_queries(call, h, token, tokens, rows, x, width);
    const int64_t size = Partial::size(queries, width);
    float* memory = scratch<float>(Scratch::state, 2 * size);
    const Partial sum(memory, queries), part(memory + size, queries);
    const int64_t segments = (call.offset + token + tokens + segment_keys - 1) / segment_keys;
    for (int64_t s = 0; s < segments; ++s) {
      attend_segment<Rows>(call, h, token, tokens, s, x, s == 0 ? sum : part, width);
      for (int64_t q = 0; s > 0 && q < queries; ++q)
        if (s * segment_keys <= call.offset + token + q / group) merge(sum, part, q, width);
    }
    for (int64_t q = 0; q < queries; ++q)
      finish(call, token + q / group, h * group + q % group, sum.total[q], sum.values + q * width);
  });
}

static void attention(const Attention& call) {
  const FloatMode mode(Denormals::kept);
  with_rows(call.keys, [&](auto* kind) {
    using Rows = std::remove_pointer_t<decltype(kind)>;
    if (call.tokens * call.heads / call.key_heads <= 64)
      attend_by_segment<Rows>(call);
    else
      attend_by_query<Rows>(call);
  });
}

}  // namespace ttd::TTD_ISA
#endif
