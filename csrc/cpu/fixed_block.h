// Activations as integers, so that products with 4-bit codes are exact and eight of them take one instruction.
#pragma once

#include <cstdint>

namespace ttd {

// 128 activations of a row as 24-bit integers in units of a power of two that the row shares: three signed bytes each,
// high to low, those of even and of odd columns apart, as the codes of a byte are.
struct alignas(64) FixedBlock {
  int8_t even[3][64];
  int8_t odd[3][64];
};

// The largest such integer that three balanced bytes hold.
constexpr float fixed_limit = 127 * 65536 + 127 * 256 + 127;

}  // namespace ttd
