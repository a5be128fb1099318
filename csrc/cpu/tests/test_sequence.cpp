// Attention, the delta rule, norms, the router and choices on every instruction set, in memory that ends where they must stop.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "attention.h"
#include "expect.h"
#include "gated_delta.h"
#include "isa.h"
#include "norms.h"
#include "pool.h"
#include "router.h"
#include "top.h"

namespace {

using namespace ttd;
using Numbers = std::vector<float>;

std::mt19937 generator(1);

Numbers numbers(int64_t count) {
  std::uniform_real_distribution<float> between(-1, 1);
  Numbers out(static_cast<size_t>(count));
  for (auto& value : out) value = between(generator);
  return out;
}

bool same(const Numbers& a, const Numbers& b) { return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0; }

bool near(float found, double exact, double bound) { return std::fabs(found - exact) <= bound; }

double silu(double x) { return x / (1 + std::exp(-x)); }

void check_attention(int64_t tokens, int64_t offset, int64_t heads, int64_t key_heads, int64_t dim) {
  const int64_t capacity = offset + tokens;
  const Numbers q = numbers(tokens * heads * dim), gate = numbers(tokens * heads * dim);
  const Numbers keys = numbers(key_heads * capacity * dim), values = numbers(key_heads * capacity * dim);
  Attention call{};
  call.tokens = tokens;
  call.heads = heads;
  call.key_heads = key_heads;
  call.head_dim = dim;
  call.offset = offset;
  call.capacity = capacity;
  call.scale = 0.5f;
  call.q = q.data();
  call.gate = gate.data();
  call.keys.numbers = keys.data();
  call.values.numbers = values.data();
  Numbers out(q.size());
  call.out = out.data();
  attention(call);

  const int64_t h = heads - 1, kv = h * key_heads / heads, t = tokens - 1, at = (t * heads + h) * dim;
  std::vector<double> exact(static_cast<size_t>(dim));
  double total = 0;
  for (int64_t s = 0; s <= offset + t; ++s) {
    double score = 0;
    for (int64_t i = 0; i < dim; ++i) score += double{q[static_cast<size_t>(at + i)]} * keys[static_cast<size_t>((kv * capacity + s) * dim + i)];
    const double weight = std::exp(0.5 * score);
    total += weight;
    for (int64_t i = 0; i < dim; ++i) exact[static_cast<size_t>(i)] += weight * values[static_cast<size_t>((kv * capacity + s) * dim + i)];
  }
  for (int64_t i = 0; i < dim; ++i) {
    const size_t index = static_cast<size_t>(at + i);
    EXPECT(near(out[index], exact[static_cast<size_t>(i)] / total / (1 + std::exp(-double{gate[index]})), 1e-5));
  }

  // The last row by itself: its keys, its bits.
  Numbers alone(static_cast<size_t>(heads * dim));
  Attention last = call;
  last.tokens = 1;
  last.offset = offset + t;
  last.q = q.data() + t * heads * dim;
  last.gate = gate.data() + t * heads * dim;
  last.out = alone.data();
  attention(last);
  EXPECT(same(alone, Numbers(out.end() - heads * dim, out.end())));
}

// Keys and values as codes, which end where their memory does, beside the floats that they stand for.
void check_coded_attention(int64_t tokens, int64_t offset, int64_t dim, int64_t group) {
  const int64_t heads = 4, key_heads = 2, capacity = offset + tokens, rows = key_heads * capacity;
  const Numbers q = numbers(tokens * heads * dim);
  Numbers plain[2], found[2];
  std::vector<uint8_t> codes[2];
  std::vector<bf16> scales[2], biases[2];
  Attention call{tokens, heads, key_heads, dim, offset, capacity, 0.5f, Type::f32, q.data(), Type::f32, nullptr, {}, {}, nullptr};
  KeptRows* const kept[]{&call.keys, &call.values};
  for (int part = 0; part < 2; ++part) {
    for (int64_t i = 0; i < rows * dim / group; ++i) {
      scales[part].push_back({static_cast<uint16_t>(0x3c00 + generator() % 128)});
      biases[part].push_back({static_cast<uint16_t>(0xbf00 + generator() % 128)});
    }
    const auto number = [](bf16 x) {
      const uint32_t bits = uint32_t{x.bits} << 16;
      float value;
      std::memcpy(&value, &bits, 4);
      return value;
    };
    for (int64_t i = 0; i < rows * dim; ++i) {
      const size_t at = static_cast<size_t>(i / group);
      codes[part].push_back(static_cast<uint8_t>(generator()));
      plain[part].push_back(std::fma(static_cast<float>(codes[part].back()), number(scales[part][at]), number(biases[part][at])));
    }
    found[part].resize(q.size());
    *kept[part] = {Type::f32, plain[part].data(), 0, nullptr, nullptr};
  }
  call.out = found[0].data();
  attention(call);
  for (int part = 0; part < 2; ++part) *kept[part] = {Type::f32, codes[part].data(), group, scales[part].data(), biases[part].data()};
  call.out = found[1].data();
  attention(call);
  for (size_t i = 0; i < q.size(); ++i) EXPECT(near(found[1][i], found[0][i], 1e-5));
}

struct Delta {
  Numbers x, a, b, conv, weight, a_log, dt_bias, state, out;
  GatedDelta call{};

  Delta(int64_t tokens, int64_t key_heads, int64_t value_heads, int64_t key_dim, int64_t value_dim) {
    call.tokens = tokens;
    call.key_heads = key_heads;
    call.value_heads = value_heads;
    call.key_dim = key_dim;
    call.value_dim = value_dim;
    call.taps = 4;
    x = numbers(tokens * call.channels());
    a = numbers(tokens * value_heads);
    b = numbers(tokens * value_heads);
    conv = numbers(3 * call.channels());
    weight = numbers(4 * call.channels());
    a_log = numbers(value_heads);
    dt_bias = numbers(value_heads);
    state = numbers(value_heads * value_dim * key_dim);
    out.resize(static_cast<size_t>(tokens * value_heads * value_dim));
  }

  // Tokens [first, first + tokens), from what conv and state hold, which move on.
  void run(int64_t first, int64_t tokens) {
    const int64_t heads = call.value_heads;
    Numbers next(conv.size());
    GatedDelta part = call;
    part.tokens = tokens;
    part.x = x.data() + first * call.channels();
    part.a = a.data() + first * heads;
    part.b = b.data() + first * heads;
    part.conv_state = conv.data();
    part.conv_weight = weight.data();
    part.a_log = a_log.data();
    part.dt_bias = dt_bias.data();
    part.state = part.new_state = state.data();
    part.out = out.data() + first * heads * call.value_dim;
    part.new_conv_state = next.data();
    gated_delta(part);
    conv = next;
  }
};

void check_delta(int64_t tokens, int64_t key_heads, int64_t value_heads, int64_t key_dim, int64_t value_dim) {
  Delta whole(tokens, key_heads, value_heads, key_dim, value_dim), steps = whole;
  const Numbers before = whole.state, raw = whole.x;
  whole.run(0, tokens);
  for (int64_t t = 0; t < tokens; ++t) steps.run(t, 1);
  EXPECT(same(whole.out, steps.out) && same(whole.state, steps.state) && same(whole.conv, steps.conv));
  const int64_t channels = whole.call.channels();
  if (tokens >= 3) EXPECT(same(whole.conv, Numbers(raw.end() - 3 * channels, raw.end())));

  // The first token of the last head in double.
  Delta first(1, key_heads, value_heads, key_dim, value_dim);
  const auto mixed = [&](int64_t channel) {
    double sum = 0;
    for (int64_t j = 0; j < 4; ++j) {
      const float input = j < 3 ? first.conv[static_cast<size_t>(j * channels + channel)] : first.x[static_cast<size_t>(channel)];
      sum += double{first.weight[static_cast<size_t>(channel * 4 + j)]} * input;
    }
    return silu(sum);
  };
  const int64_t head = value_heads - 1, key_head = head * key_heads / value_heads, keys = key_heads * key_dim;
  std::vector<double> q, k;
  double q_squares = 1e-6, k_squares = 1e-6;
  for (int64_t i = 0; i < key_dim; ++i) {
    q.push_back(mixed(key_head * key_dim + i));
    k.push_back(mixed(keys + key_head * key_dim + i));
    q_squares += q.back() * q.back();
    k_squares += k.back() * k.back();
  }
  const size_t h = static_cast<size_t>(head);
  const double decay = std::exp(-std::exp(double{first.a_log[h]}) * std::log1p(std::exp(double{first.a[h]} + first.dt_bias[h])));
  const double beta = 1 / (1 + std::exp(-double{first.b[h]}));
  const int64_t row = head * value_dim;
  std::vector<double> exact;
  for (int64_t r = 0; r < value_dim; ++r) {
    double read = 0, out = 0;
    const float* s = first.state.data() + (row + r) * key_dim;
    for (size_t i = 0; i < k.size(); ++i) read += s[i] * decay * k[i] / std::sqrt(k_squares);
    const double change = (mixed(2 * keys + row + r) - read) * beta;
    for (size_t i = 0; i < k.size(); ++i)
      out += (s[i] * decay + change * k[i] / std::sqrt(k_squares)) * q[i] / std::sqrt(q_squares * static_cast<double>(key_dim));
    exact.push_back(out);
  }
  first.run(0, 1);
  for (int64_t r = 0; r < value_dim; ++r) EXPECT(near(first.out[static_cast<size_t>(row + r)], exact[static_cast<size_t>(r)], 1e-5));
}

void check_norms(int64_t rows, int64_t width) {
  const Numbers x = numbers(rows * width), weight = numbers(width), gate = numbers(rows * width);
  Numbers out(x.size());
  rms_norm({rows, width, 1e-6f, Type::f32, x.data(), weight.data(), Type::f32, gate.data(), out.data()});
  for (int64_t row = 0; row < rows; ++row) {
    double squares = 0;
    for (int64_t i = 0; i < width; ++i) squares += double{x[static_cast<size_t>(row * width + i)]} * x[static_cast<size_t>(row * width + i)];
    const double factor = 1 / std::sqrt(squares / static_cast<double>(width) + 1e-6);
    for (int64_t i = 0; i < width; ++i) {
      const size_t at = static_cast<size_t>(row * width + i);
      EXPECT(near(out[at], x[at] * factor * weight[static_cast<size_t>(i)] * silu(gate[at]), 1e-5));
    }
  }
}

void check_rope(int64_t tokens, int64_t heads, int64_t dim, int64_t rotated) {
  const Numbers x = numbers(tokens * heads * dim), ones(static_cast<size_t>(dim), 1.0f);
  Numbers out(x.size());
  norm_rope({tokens, heads, dim, rotated, 11, 1e-6f, 1e4, Type::f32, x.data(), ones.data(), out.data()});
  // A rotation keeps the length, which the norm has made sqrt(dim).
  for (int64_t row = 0; row < tokens * heads; ++row) {
    double squares = 0;
    for (int64_t i = 0; i < dim; ++i) squares += double{out[static_cast<size_t>(row * dim + i)]} * out[static_cast<size_t>(row * dim + i)];
    EXPECT(std::fabs(squares / static_cast<double>(dim) - 1) < 1e-4);
  }
}

void check_router(int64_t experts, int64_t tokens, int64_t choices) {
  const int64_t hidden = 40;
  Numbers x = numbers(tokens * hidden), gate = numbers(experts * hidden);
  x[0] = NAN;
  std::vector<int32_t> ids(static_cast<size_t>(tokens * choices));
  Numbers weights(ids.size());
  Router call{};
  call.gate.rows = experts;
  call.gate.cols = hidden;
  call.gate.codes = gate.data();
  call.tokens = tokens;
  call.choices = choices;
  call.x = x.data();
  call.ids = ids.data();
  call.weights = weights.data();
  router(call);
  for (int64_t t = 0; t < tokens; ++t) {
    float total = 0;
    for (int64_t j = 0; j < choices; ++j) {
      const size_t at = static_cast<size_t>(t * choices + j);
      EXPECT(ids[at] >= 0 && ids[at] < experts && (j == 0 || ids[at - 1] < ids[at]));
      total += weights[at];
    }
    EXPECT(t == 0 ? std::isnan(total) : near(total, 1, 1e-6));
  }
}

void check_top(int64_t size, int64_t count) {
  Numbers logits = numbers(size);
  for (auto& value : logits) value = std::round(value * 50);
  std::vector<int32_t> ids(static_cast<size_t>(count)), order(static_cast<size_t>(size));
  Top call{size, logits.data(), count, ids.data()};
  top(call);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return logits[static_cast<size_t>(a)] > logits[static_cast<size_t>(b)]; });
  EXPECT(std::equal(ids.begin(), ids.end(), order.begin()));
}

}  // namespace

int main(int argc, char**) {
  for (Isa isa : {Isa::portable, Isa::avx2, Isa::avx512}) {
    if (!supported(isa)) continue;
    set_isa(isa);
    for (int threads : {1, 3}) {
      // One thread has no races for ThreadSanitizer, which is slow, to find: any argument leaves it out.
      if (argc > 1 && threads == 1) continue;
      set_threads(threads);
      check_attention(1, 0, 2, 1, 16);
      check_attention(1, 300, 4, 2, 24);
      check_attention(3, 255, 6, 2, 40);
      check_attention(40, 250, 8, 4, 8);
      check_coded_attention(1, 300, 64, 64);
      check_coded_attention(40, 33, 96, 32);
      check_coded_attention(2, 0, 128, 128);
      check_delta(1, 1, 1, 16, 4);
      check_delta(5, 2, 4, 24, 10);
      check_delta(37, 1, 3, 32, 13);
      check_norms(3, 5);
      check_norms(700, 48);
      check_rope(2, 3, 24, 8);
      check_rope(1, 1, 20, 20);
      check_router(5, 2, 5);
      check_router(67, 40, 6);
      check_top(1, 1);
      check_top(70, 70);
      check_top(20000, 30);
    }
  }
  set_threads(1);
  return failures != 0;
}
