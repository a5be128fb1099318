#include "isa.h"

#include <atomic>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace ttd {
namespace {

// Linux gives a process the tiles' eight kilobytes of state a thread only when it asks.
bool tiles_granted() {
#if defined(__x86_64__) && defined(__linux__)
  constexpr unsigned amx_tile = 1u << 24, amx_int8 = 1u << 25;
  constexpr long request_permission = 0x1023, tile_data = 18;
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & amx_tile) == 0 || (d & amx_int8) == 0) return false;
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return false;
#endif
}

// Matrix tiles of bf16, and vectors' conversion to it.
bool bf16_tiles() {
#if defined(__x86_64__) && defined(__linux__)
  constexpr unsigned amx_bf16 = 1u << 22, avx512_bf16 = 1u << 5;
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & amx_bf16) == 0) return false;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & avx512_bf16) != 0;
#else
  return false;
#endif
}

thread_local bool bf16_asked = false;

}  // namespace

bool has_bf16_products() {
  static const bool found = bf16_tiles();
  return found && isa() == Isa::amx;
}

bool bf16_products() { return bf16_asked && has_bf16_products(); }

void set_bf16_products(bool on) { bf16_asked = on; }

bool supported(Isa isa) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (isa == Isa::avx2) return avx2;
  if (isa == Isa::amx) {
    static const bool granted = tiles_granted();
    return granted && supported(Isa::avx512);
  }
  if (isa == Isa::avx512)
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
#endif
  return isa == Isa::portable;
}

namespace {

Isa best() {
  for (Isa isa : {Isa::amx, Isa::avx512, Isa::avx2})
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
    case Isa::amx: return "amx";
    case Isa::avx512: return "avx512";
    case Isa::avx2: return "avx2";
    default: return "portable";
  }
}

const Operations& operations() {
#if defined(__x86_64__)
  if (isa() == Isa::avx512 || isa() == Isa::amx) return avx512_operations;
  if (isa() == Isa::avx2) return avx2_operations;
#endif
  return portable_operations;
}

}  // namespace ttd
