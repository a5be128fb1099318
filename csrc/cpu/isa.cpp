#include "isa.h"

#include <atomic>

namespace ttd {

bool supported(Isa isa) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (isa == Isa::avx2) return avx2;
  if (isa == Isa::avx512)
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
#endif
  return isa == Isa::portable;
}

namespace {

Isa best() {
  for (Isa isa : {Isa::avx512, Isa::avx2})
    if (supported(isa)) return isa;
  return Isa::portable;
}

std::atomic<Isa>& chosen() {
  static std::atomic<Isa> value{best()};
  return value;
}

}  // namespace

Isa isa() { return chosen().load(std::memory_order_relaxed); }

void set_isa(Isa isa) { chosen().store(isa, std::memory_order_relaxed); }

const char* name(Isa isa) {
  switch (isa) {
    case Isa::avx512: return "avx512";
    case Isa::avx2: return "avx2";
    default: return "portable";
  }
}

const Operations& operations() {
#if defined(__x86_64__)
  if (isa() == Isa::avx512) return avx512_operations;
  if (isa() == Isa::avx2) return avx2_operations;
#endif
  return portable_operations;
}

}  // namespace ttd
