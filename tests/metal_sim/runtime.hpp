// The state of the running launch, shared by the scheduler (runtime.cpp) and the memory diagnostics (diag.cpp).
#pragma once
#include <cstddef>
#include <cstdint>

constexpr unsigned WIDTH = 32;

struct alignas(16) Vec3 {
  uint32_t at[3];
};

// What a kernel can be told about one of its threads; metal_stdlib declares the same layout.
struct Thread {
  Vec3 thread_position_in_grid, thread_position_in_threadgroup, threadgroup_position_in_grid;
  Vec3 threads_per_threadgroup, threads_per_grid, threadgroups_per_grid, dispatch_threads_per_threadgroup;
  uint32_t thread_index_in_threadgroup, thread_index_in_simdgroup, simdgroup_index_in_threadgroup;
  uint32_t threads_per_simdgroup, simdgroups_per_threadgroup;
};

enum class Wait : uint32_t { none, simd, barrier, exit };

struct SimdGroup;

struct Lane {
  void* stack_pointer;
  char* stack;
  SimdGroup* group;
  Lane* next;
  Thread thread;
  Wait wait;
  const void* site;
  uint32_t sequence;
  // Barriers passed that order threadgroup memory [0] and device memory [1].
  uint32_t epoch[2], simd_epoch[2];
};

struct SimdGroup {
  Lane* lanes[WIDTH];
  uint32_t count, arrived;
  Lane* first;
  alignas(16) unsigned char operands[2][WIDTH][16];
};

struct Buffer {
  const char* name;
  char* data;
  uint64_t bytes;
  uint32_t writable, threadgroup, initialised;
};

// launch.py declares the same layout, as it does that of Buffer.
struct Request {
  void (*entry)(void**, const Thread*);
  void** arguments;
  uint32_t grid[3], threadgroup[3];
  uint32_t order, seed, diagnose;
  float seconds;
  Buffer* buffers;
  uint32_t buffer_count;
  char* constants;
  uint64_t constant_bytes;
  char* message;
  uint32_t message_bytes;
  const void* sites[2];
};

struct Run {
  Request* request;
  Lane* lane;
  uint32_t threadgroup;
};

constexpr unsigned MAX_THREADS = 1024;
constexpr size_t STACK = 256 * 1024;
constexpr size_t GUARD = 64 * 1024;
constexpr size_t THREADGROUP_GUARD = 256;

extern Run run;
extern SimdGroup groups[MAX_THREADS / WIDTH];

// Stops the launch at `site` (a return address), which differs from `other` where that is not null.
[[noreturn]] void abandon(const void* site, const void* other, const char* format, ...);
void diagnose_start();
void diagnose_threadgroup_end();
void diagnose_end();
