#include "pool.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <thread>

#include "workers.h"

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace ttd {
namespace {

int affinity() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
  return std::max(1u, std::thread::hardware_concurrency());
}

struct Current {
  std::mutex mutex;
  std::shared_ptr<Workers> pool;
  int wanted = 0;
};

Current* current = nullptr;

// A child has the parent's memory but none of its threads, and any lock may be held by one of them: it starts afresh.
// What the parent had is left in place, since destroying it would join threads that are not there.
void after_fork() {
  const int wanted = current->wanted;
  current = new Current;
  current->wanted = wanted;
}

Current& state() {
  static const bool once = [] {
    current = new Current;
#if defined(__unix__) || defined(__APPLE__)
    pthread_atfork(nullptr, nullptr, after_fork);
#endif
    return true;
  }();
  (void)once;
  return *current;
}

std::shared_ptr<Workers> pool() {
  Current& now = state();
  std::lock_guard lock(now.mutex);
  if (!now.pool) now.pool = std::make_shared<Workers>(now.wanted > 0 ? now.wanted : affinity());
  return now.pool;
}

struct Buffer {
  void* data = nullptr;
  size_t bytes = 0;
  ~Buffer() { std::free(data); }
};

}  // namespace

int threads() { return pool()->count(); }

void set_threads(int count) {
  Current& now = state();
  std::shared_ptr<Workers> old;
  {
    std::lock_guard lock(now.mutex);
    now.wanted = count;
    old.swap(now.pool);
  }
  if (old) old->stop();
}

void run_chunks(int64_t chunks, ChunkFunction function, void* context) {
  if (!Workers::inside() && chunks > 1) {
    const auto workers = pool();
    if (workers->count() > 1 && workers->run(chunks, function, context)) return;
  }
  for (int64_t chunk = 0; chunk < chunks; ++chunk) function(context, chunk);
}

void* scratch_bytes(Scratch purpose, size_t bytes) {
  static thread_local Buffer buffers[static_cast<int>(Scratch::count)];
  Buffer& buffer = buffers[static_cast<int>(purpose)];
  if (buffer.bytes < bytes) {
    std::free(buffer.data);
    buffer.bytes = 0;
    buffer.data = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (buffer.data == nullptr) throw std::bad_alloc();
    buffer.bytes = bytes;
  }
  return buffer.data;
}

FloatMode::FloatMode(Denormals denormals) : before_(float_mode()) {
#if defined(__x86_64__)
  constexpr uint64_t ieee = 0x1f80, flush = 0x8040;
#else
  constexpr uint64_t ieee = 0, flush = 1u << 24;
#endif
  set_float_mode(denormals == Denormals::flushed ? ieee | flush : ieee);
}

FloatMode::~FloatMode() { set_float_mode(before_); }

}  // namespace ttd
