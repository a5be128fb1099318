// Packing on every instruction set against one value after the other, in memory that ends where it must stop.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "expect.h"
#include "isa.h"
#include "quantize.h"

namespace {

using namespace ttd;
using Floats = std::vector<float>;

std::mt19937 generator(1);

constexpr float infinity = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
constexpr float special[]{0.0f, -0.0f, nan, infinity, -infinity, 1e-45f, -1e-38f, 5e-8f, 1e-7f, 1, -1, 65504, 3e38f, -3e38f};

uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

uint16_t to_bf16(float value) {
  if (std::isnan(value)) return 0x7fc0;
  const uint32_t bits = bits_of(value);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float from_bf16(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Normal numbers of a magnitude, every sixteenth or so of them special where that is asked.
Floats numbers(int64_t count, float magnitude, bool with_special) {
  std::normal_distribution<float> normal(0, magnitude);
  Floats out(static_cast<size_t>(count));
  for (auto& value : out) {
    value = normal(generator);
    if (with_special && generator() % 16 == 0) value = special[generator() % std::size(special)];
  }
  return out;
}

struct Packed {
  std::vector<uint8_t> codes;
  Floats scales, biases;
};

Packed packed_one_by_one(const Floats& values, int group, int bits) {
  const float bins = static_cast<float>((1 << bits) - 1);
  Packed out{std::vector<uint8_t>(values.size() * static_cast<size_t>(bits) / 8), {}, {}};
  for (size_t first = 0; first < values.size(); first += static_cast<size_t>(group)) {
    float low = infinity, high = -infinity;
    for (size_t i = first; i < first + static_cast<size_t>(group); ++i) {
      if (values[i] < low) low = values[i];
      if (values[i] > high) high = values[i];
    }
    const bool below = std::fabs(low) > std::fabs(high);
    float scale = (high - low) / bins, bias = 0;
    if (scale < 1e-7f) scale = 1e-7f;
    if (!below) scale = -scale;
    const float edge = below ? low : high, steps = std::rint(edge / scale);
    if (steps != 0) {
      scale = edge / steps;
      bias = edge;
    }
    for (size_t i = first; i < first + static_cast<size_t>(group); ++i) {
      const float code = std::rint((values[i] - bias) / scale);
      const auto whole = static_cast<unsigned>(std::isnan(code) ? 0 : std::clamp(code, 0.0f, bins));
      const size_t at = i * static_cast<size_t>(bits);
      out.codes[at / 8] = static_cast<uint8_t>(out.codes[at / 8] | whole << at % 8);
    }
    out.scales.push_back(scale);
    out.biases.push_back(bias);
  }
  return out;
}

void check(int64_t groups, int group, int bits, float magnitude, bool with_special) {
  Floats values = numbers(groups * group, magnitude, with_special);
  std::vector<uint16_t> halves;
  for (auto& value : values) {
    halves.push_back(to_bf16(value));
    value = from_bf16(halves.back());
  }
  const Packed wanted = packed_one_by_one(values, group, bits);
  std::vector<uint8_t> codes(wanted.codes.size());
  std::vector<uint16_t> scales(static_cast<size_t>(groups)), biases(scales.size());
  quantize({groups, group, bits, Type::bf16, halves.data(), codes.data(), Type::bf16, scales.data(), biases.data()});
  EXPECT(codes == wanted.codes);
  Floats float_scales(scales.size()), float_biases(scales.size());
  std::fill(codes.begin(), codes.end(), uint8_t{0xff});
  quantize({groups, group, bits, Type::f32, values.data(), codes.data(), Type::f32, float_scales.data(), float_biases.data()});
  EXPECT(codes == wanted.codes);
  for (size_t i = 0; i < scales.size(); ++i) {
    EXPECT(scales[i] == to_bf16(wanted.scales[i]) && biases[i] == to_bf16(wanted.biases[i]));
    EXPECT(bits_of(float_scales[i]) == bits_of(wanted.scales[i]) || (std::isnan(float_scales[i]) && std::isnan(wanted.scales[i])));
    EXPECT(bits_of(float_biases[i]) == bits_of(wanted.biases[i]));
  }
}

}  // namespace

int main() {
  for (Isa isa : {Isa::portable, Isa::avx2, Isa::avx512}) {
    if (!supported(isa)) continue;
    set_isa(isa);
    for (int bits : {4, 8})
      for (int group : {32, 64, 128})
        for (int64_t groups : {1, 15, 16, 33})
          for (float magnitude : {1e-42f, 1e-8f, 1e-7f, 1e-6f, 0.02f, 1.0f, 1e5f, 1e30f, 1e38f})
            for (bool with_special : {false, true}) check(groups, group, bits, magnitude, with_special);
  }
  return failures != 0;
}
