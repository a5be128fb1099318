// Threads that share the chunks of one job at a time, until they are stopped.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ttd {

inline uint64_t float_mode() {
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

inline void set_float_mode(uint64_t mode) {
#if defined(__x86_64__)
  _mm_setcsr(static_cast<unsigned>(mode));
#elif defined(__aarch64__)
  asm volatile("msr fpcr, %0" ::"r"(mode));
#else
  (void)mode;
#endif
}

class Workers {
 public:
  explicit Workers(int count) : count_(count) {}

  int count() const { return count_; }

  // Whether this thread is at work on a chunk: a call from there runs on its own.
  static bool inside() { return inside_; }

  // False when another caller has them, or they were stopped meanwhile: the caller then computes alone rather than wait.
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
    inside_ = true;
    ring();
    help();
    for (int i = 0; i < spins && unfinished_.load(std::memory_order_acquire) != 0; ++i) pause();
    for (int32_t left; (left = unfinished_.load(std::memory_order_acquire)) != 0;) unfinished_.wait(left);
    inside_ = false;
    return true;
  }

  void stop() {
    std::lock_guard lock(owner_);
    stopping_.store(true);
    ring();
    for (auto& worker : workers_) worker.join();
  }

 private:
  // About 25 us: longer than the gap between two operations of a layer, shorter than a scheduler's slice.
  static constexpr int spins = 500;
  static constexpr uint64_t low = 0xffffffffu;
  inline static thread_local bool inside_ = false;

  static void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("isb");
#endif
  }

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
    inside_ = true;
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

}  // namespace ttd
