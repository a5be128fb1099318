#include "pool.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ttd {
namespace {

// About 25 us: longer than the gap between two operations of a layer, shorter than a scheduler's slice.
constexpr int spins = 500;
constexpr uint64_t low = 0xffffffffu;

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

uint64_t float_mode() {
#if defined(__x86_64__)
  return _mm_getcsr();
#elif defined(__aarch64__)
  uint64_t mode;
  asm volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
#else
  return 0;
#endif
}

void set_float_mode(uint64_t mode) {
#if defined(__x86_64__)
  _mm_setcsr(static_cast<unsigned>(mode));
#elif defined(__aarch64__)
  asm volatile("msr fpcr, %0" ::"r"(mode));
#else
  (void)mode;
#endif
}

int affinity() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
  return std::max(1u, std::thread::hardware_concurrency());
}

thread_local bool inside = false;

class Pool {
 public:
  explicit Pool(int count) : count_(count) {}

  int count() const { return count_; }

  // False when another caller has the pool, or it was stopped meanwhile: the caller then computes alone rather than wait.
  bool run(int64_t chunks, ChunkFunction function, void* context) {
    std::unique_lock lock(owner_, std::try_to_lock);
    if (!lock || stopping_.load()) return false;
    start();
    function_.store(function, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    mode_.store(float_mode(), std::memory_order_relaxed);
    total_.store(chunks, std::memory_order_relaxed);
    unfinished_.store(static_cast<int32_t>(chunks), std::memory_order_relaxed);
    epoch_ = (epoch_ + 1) & low;
    ticket_.store(epoch_ << 32 | static_cast<uint64_t>(chunks), std::memory_order_release);
    ring();
    help();
    for (int i = 0; i < spins && unfinished_.load(std::memory_order_acquire) != 0; ++i) pause();
    for (int32_t left; (left = unfinished_.load(std::memory_order_acquire)) != 0;) unfinished_.wait(left);
    return true;
  }

  void stop() {
    std::lock_guard lock(owner_);
    stopping_.store(true);
    ring();
    for (auto& worker : workers_) worker.join();
  }

 private:
  void start() {
    for (int i = static_cast<int>(workers_.size()) + 1; i < count_; ++i) workers_.emplace_back([this] { work(); });
  }

  void ring() {
    bell_.fetch_add(1, std::memory_order_release);
    bell_.notify_all();
  }

  // The ticket holds an epoch and the chunks not yet claimed. A claim succeeds only while the ticket is unchanged, so
  // the job read before it is the job claimed: a job is rewritten only while nothing is left to claim.
  bool help() {
    bool any = false;
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    while ((ticket & low) != 0) {
      const auto function = function_.load(std::memory_order_relaxed);
      const auto context = context_.load(std::memory_order_relaxed);
      const auto mode = mode_.load(std::memory_order_relaxed);
      const int64_t chunk = total_.load(std::memory_order_relaxed) - static_cast<int64_t>(ticket & low);
      if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
      set_float_mode(mode);
      function(context, chunk);
      if (unfinished_.fetch_sub(1, std::memory_order_acq_rel) == 1) unfinished_.notify_all();
      any = true;
      ticket = ticket_.load(std::memory_order_acquire);
    }
    return any;
  }

  void work() {
    inside = true;
    while (!stopping_.load(std::memory_order_acquire)) {
      const int32_t heard = bell_.load(std::memory_order_acquire);
      if (help()) continue;
      for (int i = 0; i < spins && bell_.load(std::memory_order_acquire) == heard; ++i) pause();
      if (!stopping_.load(std::memory_order_acquire)) bell_.wait(heard, std::memory_order_acquire);
    }
  }

  const int count_;
  std::mutex owner_;
  std::vector<std::thread> workers_;
  uint64_t epoch_ = 0;
  alignas(64) std::atomic<uint64_t> ticket_{0};
  std::atomic<ChunkFunction> function_{nullptr};
  std::atomic<void*> context_{nullptr};
  std::atomic<uint64_t> mode_{0};
  std::atomic<int64_t> total_{0};
  alignas(64) std::atomic<int32_t> unfinished_{0};
  alignas(64) std::atomic<int32_t> bell_{0};
  std::atomic<bool> stopping_{false};
};

struct Current {
  std::mutex mutex;
  std::shared_ptr<Pool> pool;
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

std::shared_ptr<Pool> pool() {
  Current& now = state();
  std::lock_guard lock(now.mutex);
  if (!now.pool) now.pool = std::make_shared<Pool>(now.wanted > 0 ? now.wanted : affinity());
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
  std::shared_ptr<Pool> old;
  {
    std::lock_guard lock(now.mutex);
    now.wanted = count;
    old.swap(now.pool);
  }
  if (old) old->stop();
}

void run_chunks(int64_t chunks, ChunkFunction function, void* context) {
  if (!inside && chunks > 1) {
    const auto workers = pool();
    if (workers->count() > 1) {
      inside = true;
      const bool ran = workers->run(chunks, function, context);
      inside = false;
      if (ran) return;
    }
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
