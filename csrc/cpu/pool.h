// The process's one thread pool. Work is split over outputs, so results do not depend on the number of threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace ttd {

// Threads that take part in an operation, the caller included: the affinity mask's size unless set_threads was called.
int threads();
void set_threads(int count);

using ChunkFunction = void (*)(void* context, int64_t chunk);
void run_chunks(int64_t chunks, ChunkFunction function, void* context);

// Calls f(chunk) once for every chunk in [0, chunks), on the caller and the pool's threads, and returns when all are
// done. f must not throw. The caller's floating-point mode holds in every thread. A nested call runs on its own thread.
template <class F>
void parallel_for(int64_t chunks, F&& f) {
  using Body = std::remove_reference_t<F>;
  run_chunks(chunks, [](void* body, int64_t chunk) { (*static_cast<Body*>(body))(chunk); }, const_cast<void*>(static_cast<const void*>(&f)));
}

// Numbers that are worth handing to another thread, where each takes a few operations.
constexpr int64_t numbers_per_chunk = 8192;

// At least `bytes` of 64-byte-aligned memory of this thread; the next call with the same purpose may move it.
enum class Scratch { inputs, pointers, counts, visits, hidden, laid_out, scales, panel, sums, products, state, tiles, shared, routed, mixer, count };
void* scratch_bytes(Scratch purpose, size_t bytes);

template <class T>
T* scratch(Scratch purpose, int64_t count) {
  return static_cast<T*>(scratch_bytes(purpose, static_cast<size_t>(count) * sizeof(T)));
}

// Whether denormal numbers are kept (IEEE) or read and written as zero, for the life of this object.
enum class Denormals { kept, flushed };

class FloatMode {
 public:
  explicit FloatMode(Denormals denormals);
  ~FloatMode();
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;

 private:
  uint64_t before_;
};

}  // namespace ttd
