#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <vector>

#include "expect.h"
#include "pool.h"
#include "workers.h"

namespace {

int64_t sum_of_squares(int64_t n) {
  std::vector<int64_t> squares(static_cast<size_t>(n));
  ttd::parallel_for(n, [&](int64_t i) { squares[static_cast<size_t>(i)] += i * i; });
  int64_t sum = 0;
  for (int64_t square : squares) sum += square;
  return sum;
}

bool correct(int64_t n) { return sum_of_squares(n) == (n - 1) * n * (2 * n - 1) / 6; }

void every_chunk_runs_once() {
  for (int threads : {1, 2, 3, 8}) {
    ttd::set_threads(threads);
    EXPECT(ttd::threads() == threads);
    for (int round = 0; round < 300; ++round) EXPECT(correct(round % 40));
  }
}

void callers_at_once_do_not_mix() {
  ttd::set_threads(3);
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i)
    callers.emplace_back([&] {
      for (int round = 0; round < 100; ++round) wrong += !correct(50);
    });
  for (auto& caller : callers) caller.join();
  EXPECT(wrong == 0);
}

void the_pool_can_be_resized_while_in_use() {
  std::atomic<bool> stop{false};
  std::atomic<int> wrong{0};
  std::thread caller([&] {
    while (!stop) wrong += !correct(20);
  });
  for (int round = 0; round < 30; ++round) ttd::set_threads(1 + round % 4);
  stop = true;
  caller.join();
  EXPECT(wrong == 0);
}

// A caller that has the workers in hand may find them stopped before they first ran: nobody would join new threads.
void stopped_workers_start_no_threads() {
  ttd::Workers workers(3);
  workers.stop();
  EXPECT(!workers.run(2, [](void*, int64_t) {}, nullptr));
}

void a_nested_call_runs() {
  ttd::set_threads(2);
  std::atomic<int> wrong{0};
  ttd::parallel_for(8, [&](int64_t) { wrong += !correct(10); });
  EXPECT(wrong == 0);
}

void a_sleeping_pool_wakes() {
  ttd::set_threads(2);
  for (int round = 0; round < 5; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
    EXPECT(correct(30));
  }
}

volatile float tiny = 1e-40f;

void the_float_mode_reaches_every_thread() {
  ttd::set_threads(3);
  for (auto mode : {ttd::Denormals::kept, ttd::Denormals::flushed}) {
    std::atomic<int> kept{0};
    {
      const ttd::FloatMode scope(mode);
      ttd::parallel_for(64, [&](int64_t) { kept += tiny * 0.5f != 0.0f; });
    }
    EXPECT(kept == (mode == ttd::Denormals::kept ? 64 : 0));
    EXPECT(tiny * 0.5f != 0.0f);
  }
}

void a_child_has_a_pool_of_its_own() {
  ttd::set_threads(2);
  EXPECT(correct(30));
  const pid_t child = fork();
  if (child == 0) _exit(ttd::threads() == 2 && correct(30) ? 0 : 1);
  int status = 0;
  EXPECT(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT(correct(30));
}

}  // namespace

int main(int argc, char**) {
  every_chunk_runs_once();
  callers_at_once_do_not_mix();
  the_pool_can_be_resized_while_in_use();
  stopped_workers_start_no_threads();
  a_nested_call_runs();
  a_sleeping_pool_wakes();
  the_float_mode_reaches_every_thread();
  // ThreadSanitizer does not let a child of a process with threads start its own: any argument leaves this out.
  if (argc == 1) a_child_has_a_pool_of_its_own();
  ttd::set_threads(1);
  return failures != 0;
}
