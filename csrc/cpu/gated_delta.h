// The gated delta rule behind its causal convolution, token after token: any split of the tokens gives the same bits.
#pragma once

#include "numbers.h"

namespace ttd {

struct GatedDelta {
  static constexpr int64_t most_taps = 8;

  int64_t tokens, key_heads, value_heads, key_dim, value_dim, taps;
  Type x_type;
  const void* x;  // [tokens, channels], raw projections: all heads' q, then k, then v
  Type a_type, b_type;
  const void *a, *b;  // [tokens, value_heads]
  Type conv_type;
  const void* conv_state;    // [taps - 1, channels], the raw inputs before x
  const float* conv_weight;  // [channels, taps]
  const float *a_log, *dt_bias;  // [value_heads]
  const float* state;  // [value_heads, value_dim, key_dim]
  float* out;          // [tokens, value_heads, value_dim]
  void* new_conv_state;
  float* new_state;  // may be `state`

  int64_t channels() const { return 2 * key_heads * key_dim + value_heads * value_dim; }
};

void gated_delta(const GatedDelta& call);

}  // namespace ttd

#ifdef TTD_OPERATIONS
#include <cmath>

#include "pool.h"
#include "sixteens.h"

namespace ttd::TTD_ISA {

constexpr int64_t span_tokens = 32;  // tokens whose convolved channels are held at once
// Rows of a state that advance together: enough to hide how long a sum takes.
#if defined(__AVX512F__)
constexpr int state_rows = 8;
#else
constexpr int state_rows = 4;
#endif

// The convolution's input `row` of up to sixteen channels, as the conv state would hold it.
template <class X, class S>
static inline Floats raw_input(const GatedDelta& call, int64_t row, int64_t channel, int64_t count) {
  const int64_t channels = call.channels(), past = call.taps - 1;
  if (row < 0) return load_upto(static_cast<const S*>(call.conv_state) + (row + past) * channels + channel, count);
  const Floats value = load_upto(static_cast<const X*>(call.x) + row * channels + channel, count);
  if constexpr (std::is_same_v<X, S> || std::is_same_v<S, float>) {
    return value;
  } else {
    S lanes[16];
    store(lanes, value);
    return load(lanes);
  }
}

// The weights of `count` channels, at most sixteen, by tap.
static inline void weights_by_tap(const float* weight, int64_t taps, int64_t count, float (*by_tap)[16]) {
  if (taps == 4 && count == 16) {
    for (int j = 0; j < 4; ++j)
      for (int i = 0; i < 16; ++i) by_tap[j][i] = weight[4 * i + j];
  } else {
    for (int64_t j = 0; j < taps; ++j)
      for (int64_t i = 0; i < 16; ++i) by_tap[j][i] = i < count ? weight[i * taps + j] : 0.0f;
  }
}

// Channels [first, first + count) of tokens [start, start + tokens) after convolution and silu: out [tokens, width].
template <class X, class S>
static inline void convolve(const GatedDelta& call, int64_t first, int64_t count, int64_t start, int64_t tokens, float* out,
                            int64_t width) {
  over_sixteens(count, [&](int64_t c, int64_t some) {
    float by_tap[GatedDelta::most_taps][16];
    weights_by_tap(call.conv_weight + (first + c) * call.taps, call.taps, some, by_tap);
    for (int64_t t = 0; t < tokens; ++t) {
      Floats total = splat(0.0f);
      for (int64_t j = 0; j < call.taps; ++j)
        total = fma(raw_input<X, S>(call, start + t + j - call.taps + 1, first + c, some), load(by_tap[j]), total);
      store(out + t * width + c, silu(total));
    }
  });
}

// The last taps - 1 raw inputs of channels [first, first + count).
template <class X, class S>
static inline void keep_inputs(const GatedDelta& call, int64_t first, int64_t count) {
  const int64_t past = call.taps - 1;
  for (int64_t r = 0; r < past; ++r)
    over_sixteens(count, [&](int64_t c, int64_t some) {
      store_upto(static_cast<S*>(call.new_conv_state) + r * call.channels() + first + c,
                 raw_input<X, S>(call, call.tokens - past + r, first + c, some), some);
    });
}

static inline void normalise(float* x, int64_t width, float scale) {
  Floats squares = splat(0.0f);
  for (int64_t i = 0; i < width; i += 16) squares = fma(load(x + i), load(x + i), squares);
  const Floats factor = splat(scale / std::sqrt(sum(squares) + 1e-6f));
  for (int64_t i = 0; i < width; i += 16) store(x + i, load(x + i) * factor);
}

static inline float number(Type type, const void* from, int64_t index) {
  float lanes[16];
  with_type(type, [&](auto* kind) { store(lanes, load_some(static_cast<decltype(kind)>(const_cast<void*>(from)) + index, 1)); });
  return lanes[0];
}

struct Gates {
  float decay, beta;

  Gates(const GatedDelta& call, int64_t token, int64_t head) {
    const int64_t index = token * call.value_heads + head;
    const float step = number(call.a_type, call.a, index) + call.dt_bias[head];
    const float softplus = std::fmax(step, 0.0f) + std::log1p(std::exp(-std::fabs(step)));
    decay = std::exp(-std::exp(call.a_log[head]) * (step == step ? softplus : step));
    beta = 1.0f / (1.0f + std::exp(-number(call.b_type, call.b, index)));
  }
};

// What one value head sees of a span of tokens; q and k have zeros beyond key_dim up to key_width.
struct Span {
  int64_t tokens, key_dim, key_width, value_width, out_stride;
  const float *q, *k, *v;
  const Gates* gates;
};

// R rows of a state through a span: S *= decay; d = (v - S k) beta; S += d k; out = S q.
template <int R>
static inline void advance_rows(const Span& span, int64_t row, const float* from, float* to, float* out) {
  const int64_t dim = span.key_dim;
  for (int64_t t = 0; t < span.tokens; ++t) {
    const float *k = span.k + t * span.key_width, *q = span.q + t * span.key_width;
    const Floats decay = splat(span.gates[t].decay);
    Floats lanes[R];
    for (int r = 0; r < R; ++r) lanes[r] = splat(0.0f);
    over_sixteens(dim, [&](int64_t i, int64_t n) {
      for (int r = 0; r < R; ++r) {
        if (t == 0) read_ahead(from + r * dim + i);
        lanes[r] = fma(load_upto(from + r * dim + i, n) * decay, load(k + i), lanes[r]);
      }
    });
    float read[R];
    sum_each<R>(lanes, read);
    Floats change[R];
    for (int r = 0; r < R; ++r) {
      change[r] = splat((span.v[t * span.value_width + row + r] - read[r]) * span.gates[t].beta);
      lanes[r] = splat(0.0f);
    }
    over_sixteens(dim, [&](int64_t i, int64_t n) {
      for (int r = 0; r < R; ++r) {
        const Floats s = fma(change[r], load(k + i), load_upto(from + r * dim + i, n) * decay);
        store_upto(to + r * dim + i, s, n);
        lanes[r] = fma(s, load(q + i), lanes[r]);
      }
    });
    sum_each<R>(lanes, out + t * span.out_stride + row);
    from = to;
  }
}

// One key head and the value heads that use it, through all tokens.
template <class X, class S>
static inline void advance_heads(const GatedDelta& call, int64_t key_head) {
  const int64_t repeats = call.value_heads / call.key_heads, keys = call.key_heads * call.key_dim;
  const int64_t key_width = round_up(call.key_dim), value_width = round_up(call.value_dim);
  const int64_t first_q = key_head * call.key_dim, first_k = keys + first_q;
  const int64_t first_v = 2 * keys + key_head * repeats * call.value_dim;
  const int64_t head_size = call.value_dim * call.key_dim;
  float* q = scratch<float>(Scratch::state, span_tokens * (2 * key_width + value_width));
  float *k = q + span_tokens * key_width, *v = k + span_tokens * key_width;
  for (int64_t start = 0; start < call.tokens; start += span_tokens) {
    const int64_t tokens = call.tokens - start < span_tokens ? call.tokens - start : span_tokens;
    convolve<X, S>(call, first_q, call.key_dim, start, tokens, q, key_width);
    convolve<X, S>(call, first_k, call.key_dim, start, tokens, k, key_width);
    for (int64_t t = 0; t < tokens; ++t) {
      normalise(q + t * key_width, key_width, 1.0f / std::sqrt(static_cast<float>(call.key_dim)));
      normalise(k + t * key_width, key_width, 1.0f);
    }
    for (int64_t h = 0; h < repeats; ++h) {
      const int64_t head = key_head * repeats + h;
      convolve<X, S>(call, first_v + h * call.value_dim, call.value_dim, start, tokens, v, value_width);
      Gates* gates = scratch<Gates>(Scratch::counts, span_tokens);
      for (int64_t t = 0; t < tokens; ++t) gates[t] = Gates(call, start + t, head);
      const Span span{tokens, call.key_dim, key_width, value_width, call.value_heads * call.value_dim, q, k, v, gates};
      const float* from = (start == 0 ? call.state : call.new_state) + head * head_size;
      float* to = call.new_state + head * head_size;
      float* out = call.out + (start * call.value_heads + head) * call.value_dim;
      over_tiles_of<state_rows>(call.value_dim, [&](int64_t row, auto R) {
        advance_rows<R>(span, row, from + row * call.key_dim, to + row * call.key_dim, out);
      });
    }
  }
  keep_inputs<X, S>(call, first_q, call.key_dim);
  keep_inputs<X, S>(call, first_k, call.key_dim);
  keep_inputs<X, S>(call, first_v, repeats * call.value_dim);
}

static void gated_delta(const GatedDelta& call) {
  const FloatMode mode(Denormals::kept);
  with_type(call.x_type, [&](auto* x) {
    with_type(call.conv_type, [&](auto* kept) {
      using X = std::remove_pointer_t<decltype(x)>;
      using S = std::remove_pointer_t<decltype(kept)>;
      parallel_for(call.key_heads, [&](int64_t key_head) { advance_heads<X, S>(call, key_head); });
    });
  });
}

}  // namespace ttd::TTD_ISA
#endif
