// Every operation on every instruction set, small, on memory that ends where the operation must stop.
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "expect.h"
#include "expert_ffn.h"
#include "isa.h"
#include "linear.h"
#include "pool.h"

namespace {

using namespace ttd;

std::mt19937 generator(1);

float uniform(float low, float high) { return std::uniform_real_distribution<float>(low, high)(generator); }

uint16_t to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return static_cast<uint16_t>(bits >> 16);
}

float from_bf16(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// A matrix in memory of exactly its size, and its values.
struct Stored {
  Matrix m;
  std::vector<uint8_t> codes;
  std::vector<uint16_t> scales, biases;

  Stored(Format format, int64_t rows, int64_t cols, int group) {
    m.format = format;
    m.type = Type::bf16;
    m.group = group;
    m.rows = rows;
    m.cols = cols;
    codes.resize(static_cast<size_t>(rows * m.row_bytes()));
    if (format == Format::plain) {
      for (size_t i = 0; i < codes.size(); i += 2) {
        const uint16_t value = to_bf16(uniform(-1, 1));
        std::memcpy(&codes[i], &value, 2);
      }
    } else {
      for (auto& byte : codes) byte = static_cast<uint8_t>(generator());
      for (int64_t i = 0; i < rows * m.groups(); ++i) {
        scales.push_back(to_bf16(uniform(0.01f, 0.02f)));
        biases.push_back(to_bf16(uniform(-0.2f, 0.0f)));
      }
    }
    m.codes = codes.data();
    m.scales = scales.data();
    m.biases = biases.data();
  }

  double at(int64_t row, int64_t col) const {
    const uint8_t* from = codes.data() + row * m.row_bytes();
    if (m.format == Format::plain) {
      uint16_t value;
      std::memcpy(&value, from + 2 * col, 2);
      return from_bf16(value);
    }
    const int code = m.format == Format::int8 ? from[col] : from[col / 2] >> (4 * (col % 2)) & 15;
    const size_t group = static_cast<size_t>(row * m.groups() + col / m.group);
    return static_cast<double>(code) * from_bf16(scales[group]) + from_bf16(biases[group]);
  }
};

void check_linear(Format format, int64_t rows, int64_t cols, int group, int64_t tokens, bool prefill, bool rounded = false) {
  Stored stored(format, rows, cols, group);
  stored.m.rounded = rounded;
  const double bound = rounded ? 0x1p-7 + 0x1p-16 : 3e-6;
  std::vector<float> x(static_cast<size_t>(tokens * cols));
  for (auto& value : x) value = uniform(-1, 1);
  const int64_t start = rows / 3;
  std::vector<float> out(static_cast<size_t>(tokens * (rows - start)));
  const Linear call{stored.m, start, rows, tokens, Type::f32, x.data(), Type::f32, out.data(), prefill};
  linear_all(&call, 1);
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t r = start; r < rows; ++r) {
      double exact = 0, size = 0;
      for (int64_t c = 0; c < cols; ++c) {
        const double product = stored.at(r, c) * x[static_cast<size_t>(t * cols + c)];
        exact += product;
        size += std::fabs(product);
      }
      EXPECT(std::fabs(out[static_cast<size_t>(t * (rows - start) + r - start)] - exact) <= bound * size + 1e-6);
    }
}

// Products side by side have the bits that each has alone.
void check_together(int64_t tokens, bool prefill) {
  const Stored stored[]{Stored(Format::int4, 70, 384, 64), Stored(Format::plain, 33, 384, 16), Stored(Format::int4, 5, 384, 64),
                        Stored(Format::int4, 40, 384, 128)};
  std::vector<float> x(static_cast<size_t>(tokens * 384)), together[4], alone[4];
  for (auto& value : x) value = uniform(-1, 1);
  Linear calls[4];
  for (int i = 0; i < 4; ++i) {
    const Matrix& m = stored[i].m;
    together[i].resize(static_cast<size_t>(tokens * m.rows));
    alone[i].resize(together[i].size());
    calls[i] = {m, 0, m.rows, tokens, Type::f32, x.data(), Type::f32, together[i].data(), prefill};
  }
  linear_all(calls, 4);
  for (int i = 0; i < 4; ++i) {
    calls[i].out = alone[i].data();
    linear_all(calls + i, 1);
    EXPECT(std::memcmp(alone[i].data(), together[i].data(), alone[i].size() * sizeof(float)) == 0);
  }
}

void check_experts(Format format, int group, int64_t tokens) {
  constexpr int64_t experts = 5, choices = 2;
  const int64_t hidden = 2 * group, inter = group;
  ExpertFfn call{};
  std::vector<Stored> up, down;
  for (int64_t e = 0; e < experts; ++e) {
    up.emplace_back(format, 2 * inter, hidden, group);
    down.emplace_back(format, hidden, inter, group);
  }
  int64_t end = 0;
  const auto place = [&](Part& part, const Matrix& m) {
    part.matrix = m;
    part.codes = end;
    part.scales = part.codes + m.rows * m.row_bytes();
    part.biases = part.scales + 2 * m.rows * m.groups();
    end = part.biases + 2 * m.rows * m.groups();
  };
  place(call.gate_up, up[0].m);
  place(call.down, down[0].m);
  std::vector<uint8_t> records(static_cast<size_t>(experts * end));
  std::vector<int32_t> slot_of;
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t slot = (e + 2) % experts;
    slot_of.push_back(static_cast<int32_t>(slot));
    const auto copy = [&](const Part& part, const Stored& from) {
      uint8_t* to = records.data() + slot * end;
      std::memcpy(to + part.codes, from.codes.data(), from.codes.size());
      std::memcpy(to + part.scales, from.scales.data(), 2 * from.scales.size());
      std::memcpy(to + part.biases, from.biases.data(), 2 * from.biases.size());
    };
    copy(call.gate_up, up[static_cast<size_t>(e)]);
    copy(call.down, down[static_cast<size_t>(e)]);
  }
  slot_of[3] = -1;
  std::vector<float> x(static_cast<size_t>(tokens * hidden)), weights(static_cast<size_t>(tokens * choices));
  std::vector<int32_t> chosen;
  for (auto& value : x) value = uniform(-1, 1);
  for (auto& value : weights) value = uniform(0, 1);
  for (int64_t t = 0; t < tokens; ++t) {
    chosen.push_back(static_cast<int32_t>(t % 4));
    chosen.push_back(static_cast<int32_t>(t % 4 + 1));
  }
  std::vector<float> out(static_cast<size_t>(tokens * hidden)), each(static_cast<size_t>(tokens * choices * hidden));
  call.stride = end;
  call.slots = experts;
  call.records = records.data();
  call.experts = experts;
  call.slot_of = slot_of.data();
  call.tokens = tokens;
  call.choices = choices;
  call.chosen = chosen.data();
  call.weights = weights.data();
  call.x_type = Type::f32;
  call.x = x.data();
  call.out = out.data();
  EXPECT(problem(call) == nullptr);
  expert_ffn(call);

  call.weights = nullptr;
  call.out = each.data();
  expert_ffn(call);
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t c = 0; c < hidden; ++c) {
      float sum = 0;
      for (int64_t j = 0; j < choices; ++j) {
        const float weighted = weights[static_cast<size_t>(t * choices + j)] * each[static_cast<size_t>((t * choices + j) * hidden + c)];
        sum = j == 0 ? weighted : sum + weighted;
      }
      EXPECT(out[static_cast<size_t>(t * hidden + c)] == sum);
    }

  const int64_t t = tokens - 1, e = chosen[static_cast<size_t>(t * choices)];
  if (slot_of[static_cast<size_t>(e)] >= 0) {
    std::vector<double> middle;
    for (int64_t i = 0; i < inter; ++i) {
      double gate = 0, lift = 0;
      for (int64_t c = 0; c < hidden; ++c) {
        gate += up[static_cast<size_t>(e)].at(i, c) * x[static_cast<size_t>(t * hidden + c)];
        lift += up[static_cast<size_t>(e)].at(inter + i, c) * x[static_cast<size_t>(t * hidden + c)];
      }
      middle.push_back(gate / (1 + std::exp(-gate)) * lift);
    }
    for (int64_t c = 0; c < hidden; ++c) {
      double exact = 0, size = 0;
      for (int64_t i = 0; i < inter; ++i) {
        const double product = down[static_cast<size_t>(e)].at(c, i) * middle[static_cast<size_t>(i)];
        exact += product;
        size += std::fabs(product);
      }
      EXPECT(std::fabs(each[static_cast<size_t>(t * choices * hidden + c)] - exact) <= 1e-5 * size + 1e-6);
    }
  }

  ExpertFfn bad = call;
  bad.stride = end - 1;
  EXPECT(problem(bad) != nullptr);
  bad = call;
  bad.slots = experts - 1;
  EXPECT(problem(bad) != nullptr);
  std::vector<int32_t> beyond = chosen;
  beyond.back() = experts;
  bad = call;
  bad.chosen = beyond.data();
  EXPECT(problem(bad) != nullptr);
  bad = call;
  bad.gate_up.scales = -64;
  EXPECT(problem(bad) != nullptr);
}

}  // namespace

int main(int argc, char**) {
  for (Isa isa : {Isa::portable, Isa::avx2, Isa::avx512, Isa::amx}) {
    if (!supported(isa)) continue;
    set_isa(isa);
    for (int threads : {1, 3}) {
      // One thread has no races for ThreadSanitizer, which is slow, to find: any argument leaves it out.
      if (argc > 1 && threads == 1) continue;
      set_threads(threads);
      for (int64_t tokens : {1, 2, 7, 100}) {
        for (int group : {32, 64, 128})
          for (Format format : {Format::int4, Format::int8}) {
            for (bool prefill : {false, true}) check_linear(format, 37, 3 * group, group, tokens, prefill);
            if (has_bf16_products() && format == Format::int4) check_linear(format, 37, 3 * group, group, tokens, true, true);
            check_experts(format, group, tokens);
          }
        check_linear(Format::plain, 35, 51, 16, tokens, false);
        for (bool prefill : {false, true}) check_together(tokens, prefill);
      }
      check_linear(Format::int4, 5, 64 * 33, 64, 3, true);
      check_linear(Format::int8, 5, 64 * 33, 64, 3, false);
    }
  }
  set_threads(1);
  return failures != 0;
}
