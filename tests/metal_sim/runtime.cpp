// Runs a kernel's threads as fibers: one threadgroup at a time, the lanes of a SIMD-group meeting at each SIMD operation.
#include "runtime.hpp"

#include <algorithm>
#include <csetjmp>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <numeric>
#include <random>
#include <vector>

#include <pthread.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <ucontext.h>

Run run;
SimdGroup groups[MAX_THREADS / WIDTH];
extern "C" void msl_switch(void** from, void* to);

namespace {

Lane lanes[MAX_THREADS];
void* scheduler_stack_pointer;
sigjmp_buf failure;
pthread_t owner;

asm(R"(
.globl msl_switch
.type msl_switch,@function
msl_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
)");
constexpr size_t SAVED = 6;
constexpr unsigned FLUSH_DENORMALS = 0x8040;

void switch_to(Lane* lane) {
  Lane* from = run.lane;
  run.lane = lane;
  msl_switch(&from->stack_pointer, lane->stack_pointer);
}

void to_scheduler() { msl_switch(&run.lane->stack_pointer, scheduler_stack_pointer); }

const char* doing(const Lane* lane) {
  return lane->wait == Wait::exit ? "has ended" : lane->wait == Wait::barrier ? "waits at a barrier" : "is at a SIMD operation";
}

void check_convergence(SimdGroup& group) {
  Lane* first = group.lanes[0];
  for (unsigned i = 1; i < group.count; ++i) {
    Lane* lane = group.lanes[i];
    if (lane->wait != first->wait || lane->site != first->site)
      abandon(first->site, lane->site, "diverged: lane 0 %s and lane %u %s", doing(first), i, doing(lane));
  }
}

// Waits for the lane's whole SIMD-group; a barrier or an end waits for the threadgroup too.
void meet(Wait wait, const void* site) {
  Lane* lane = run.lane;
  SimdGroup& group = *lane->group;
  lane->wait = wait;
  lane->site = site;
  if (++group.arrived < group.count) {
    switch_to(lane->next);
    return;
  }
  group.arrived = 0;
  check_convergence(group);
  if (wait != Wait::simd) to_scheduler();
}

void fiber_main() {
  run.request->entry(run.request->arguments, &run.lane->thread);
  meet(Wait::exit, nullptr);
  __builtin_trap();
}

void prepare_fiber(Lane& lane) {
  auto** top = reinterpret_cast<void**>(lane.stack + STACK) - 16;
  std::fill(top, top + SAVED, nullptr);
  top[SAVED] = reinterpret_cast<void*>(fiber_main);
  lane.stack_pointer = top;
}

void allocate_stacks(unsigned threads) {
  for (unsigned i = 0; i < threads; ++i) {
    if (lanes[i].stack) continue;
    void* p = mmap(nullptr, STACK + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    mprotect(p, 4096, PROT_NONE);
    lanes[i].stack = static_cast<char*>(p) + 4096;
  }
}

std::mt19937 shuffler;

std::vector<unsigned> ordered(unsigned count) {
  std::vector<unsigned> order(count);
  std::iota(order.begin(), order.end(), 0);
  if (run.request->order == 1) std::reverse(order.begin(), order.end());
  if (run.request->order == 2) std::shuffle(order.begin(), order.end(), shuffler);
  return order;
}

void run_threadgroup(uint32_t index, const uint32_t counts[3]) {
  const Request& r = *run.request;
  const Vec3 place{{index % counts[0], index / counts[0] % counts[1], index / counts[0] / counts[1]}};
  const Vec3 whole{{r.threadgroup[0], r.threadgroup[1], r.threadgroup[2]}};
  Vec3 size{};
  for (unsigned axis = 0; axis < 3; ++axis)
    size.at[axis] = std::min(whole.at[axis], r.grid[axis] - place.at[axis] * whole.at[axis]);
  const uint32_t threads = size.at[0] * size.at[1] * size.at[2];
  const uint32_t group_count = (threads + WIDTH - 1) / WIDTH;
  run.threadgroup = index + 1;
  for (uint32_t i = 0; i < threads; ++i) {
    Lane& lane = lanes[i];
    Thread& t = lane.thread;
    t.thread_position_in_threadgroup = {{i % size.at[0], i / size.at[0] % size.at[1], i / size.at[0] / size.at[1]}};
    t.threadgroup_position_in_grid = place;
    for (unsigned axis = 0; axis < 3; ++axis)
      t.thread_position_in_grid.at[axis] =
          place.at[axis] * whole.at[axis] + t.thread_position_in_threadgroup.at[axis];
    t.threads_per_threadgroup = size;
    t.dispatch_threads_per_threadgroup = whole;
    t.threads_per_grid = {{r.grid[0], r.grid[1], r.grid[2]}};
    t.threadgroups_per_grid = {{counts[0], counts[1], counts[2]}};
    t.thread_index_in_threadgroup = i;
    t.thread_index_in_simdgroup = i % WIDTH;
    t.simdgroup_index_in_threadgroup = i / WIDTH;
    t.threads_per_simdgroup = WIDTH;
    t.simdgroups_per_threadgroup = group_count;
    lane.group = &groups[i / WIDTH];
    lane.wait = Wait::none;
    lane.sequence = 0;
    for (unsigned kind = 0; kind < 2; ++kind) lane.epoch[kind] = lane.simd_epoch[kind] = 0;
    lane.group->lanes[i % WIDTH] = &lane;
    prepare_fiber(lane);
  }
  for (uint32_t g = 0; g < group_count; ++g) {
    SimdGroup& group = groups[g];
    group.count = std::min(WIDTH, threads - g * WIDTH);
    group.arrived = 0;
    const auto order = ordered(group.count);
    for (unsigned i = 0; i < group.count; ++i)
      group.lanes[order[i]]->next = group.lanes[order[(i + 1) % group.count]];
    group.first = group.lanes[order[0]];
  }
  const auto order = ordered(group_count);
  for (bool ended = false; !ended;) {
    for (unsigned g : order) {
      run.lane = groups[g].first;
      msl_switch(&scheduler_stack_pointer, run.lane->stack_pointer);
    }
    const Lane* first = groups[0].lanes[0];
    for (uint32_t g = 1; g < group_count; ++g) {
      const Lane* lane = groups[g].lanes[0];
      if (lane->wait != first->wait || lane->site != first->site)
        abandon(first->site, lane->site, "diverged: SIMD-group 0 %s and SIMD-group %u %s", doing(first), g, doing(lane));
    }
    ended = first->wait == Wait::exit;
  }
}

void on_signal(int signal, siginfo_t* info, void* context) {
  if (!pthread_equal(pthread_self(), owner)) {
    pthread_kill(owner, signal);
    return;
  }
  const auto& machine = static_cast<ucontext_t*>(context)->uc_mcontext;
  const void* site = reinterpret_cast<void*>(machine.gregs[REG_RIP]);
  const char* stack = run.lane->stack;
  const char* address = static_cast<char*>(info->si_addr);
  if (signal == SIGVTALRM) abandon(site, nullptr, "still running after %g s", run.request->seconds);
  if (signal == SIGFPE) abandon(site, nullptr, "integer division by zero or overflow");
  if (address >= stack - 4096 && address < stack) abandon(site, nullptr, "stack overflow");
  abandon(site, nullptr, "access to memory that no argument has");
}

constexpr int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGVTALRM};

}  // namespace

void abandon(const void* site, const void* other, const char* format, ...) {
  Request& r = *run.request;
  r.sites[0] = site;
  r.sites[1] = other;
  va_list list;
  va_start(list, format);
  vsnprintf(r.message, r.message_bytes, format, list);
  va_end(list);
  siglongjmp(failure, 1);
}

#pragma GCC visibility push(default)
extern "C" {

// Exchanges an operand among a SIMD-group: each lane's 16 bytes, in order of lane.
const unsigned char* msl_exchange(const void* operand, uint32_t bytes) {
  Lane* lane = run.lane;
  auto& slots = lane->group->operands[lane->sequence++ % 2];
  memcpy(slots[lane->thread.thread_index_in_simdgroup], operand, bytes);
  meet(Wait::simd, __builtin_return_address(0));
  return slots[0];
}

uint32_t msl_lane() { return run.lane->thread.thread_index_in_simdgroup; }
uint32_t msl_lanes() { return run.lane->group->count; }

void msl_missing_lane(uint32_t lane) {
  abandon(__builtin_return_address(0), nullptr, "SIMD operation reads lane %u of a SIMD-group of %u", lane,
          run.lane->group->count);
}

void msl_simdgroup_barrier(uint32_t orders_device, uint32_t orders_threadgroup) {
  meet(Wait::simd, __builtin_return_address(0));
  run.lane->simd_epoch[0] += orders_threadgroup;
  run.lane->simd_epoch[1] += orders_device;
}

void msl_threadgroup_barrier(uint32_t orders_device, uint32_t orders_threadgroup) {
  meet(Wait::barrier, __builtin_return_address(0));
  run.lane->epoch[0] += orders_threadgroup;
  run.lane->epoch[1] += orders_device;
}

// Zeroed memory between pages that nothing may touch; `bytes` may be 0.
char* msl_allocate(uint64_t bytes) {
  const size_t inner = (bytes + GUARD - 1) / GUARD * GUARD;
  void* p = mmap(nullptr, inner + 2 * GUARD, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return nullptr;
  char* data = static_cast<char*>(p) + GUARD;
  mprotect(data, inner, PROT_READ | PROT_WRITE);
  return data;
}

void msl_free(char* data, uint64_t bytes) { munmap(data - GUARD, (bytes + GUARD - 1) / GUARD * GUARD + 2 * GUARD); }

int msl_launch(Request* request) {
  run = {};
  run.request = request;
  const Request& r = *request;
  uint32_t counts[3];
  for (unsigned axis = 0; axis < 3; ++axis) counts[axis] = (r.grid[axis] + r.threadgroup[axis] - 1) / r.threadgroup[axis];
  allocate_stacks(r.threadgroup[0] * r.threadgroup[1] * r.threadgroup[2]);
  shuffler.seed(r.seed);
  owner = pthread_self();

  static char signal_stack[64 * 1024];
  stack_t own{}, previous_stack;
  own.ss_sp = signal_stack;
  own.ss_size = sizeof signal_stack;
  sigaltstack(&own, &previous_stack);
  struct sigaction action {}, previous[std::size(SIGNALS)];
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (size_t i = 0; i < std::size(SIGNALS); ++i) sigaction(SIGNALS[i], &action, &previous[i]);
  itimerval limit{}, no_limit{};
  limit.it_value.tv_sec = static_cast<time_t>(r.seconds);
  limit.it_value.tv_usec = static_cast<suseconds_t>((r.seconds - static_cast<float>(limit.it_value.tv_sec)) * 1e6f);
  setitimer(ITIMER_VIRTUAL, &limit, nullptr);
  const unsigned denormals = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(denormals | FLUSH_DENORMALS);

  const int failed = sigsetjmp(failure, 1);
  if (!failed) {
    if (r.diagnose) diagnose_start();
    for (unsigned index : ordered(counts[0] * counts[1] * counts[2])) {
      run_threadgroup(index, counts);
      if (r.diagnose) diagnose_threadgroup_end();
    }
  }
  __builtin_ia32_ldmxcsr(denormals);
  if (r.diagnose) diagnose_end();
  setitimer(ITIMER_VIRTUAL, &no_limit, nullptr);
  for (size_t i = 0; i < std::size(SIGNALS); ++i) sigaction(SIGNALS[i], &previous[i], nullptr);
  sigaltstack(&previous_stack, nullptr);
  return failed;
}

// libgcc 12 lacks this conversion (round to nearest, ties to even), which clang calls for bfloat.
__bf16 __truncsfbf2(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  const bool nan = (bits & 0x7FFFFFFF) > 0x7F800000;
  const uint16_t high = nan ? bits >> 16 | 0x40 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  __bf16 result;
  memcpy(&result, &high, 2);
  return result;
}
}
#pragma GCC visibility pop
