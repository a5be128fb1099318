#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <thread>
#include <vector>

#include "expect.h"
#include "read_pool.h"

namespace {

using namespace ttd;
using Bytes = std::vector<uint8_t>;

constexpr size_t size = 100000;

// A file of known bytes that goes away by itself.
struct Bytefile {
  std::FILE* file = std::tmpfile();
  Bytes bytes = Bytes(size);
  Bytefile() {
    for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<uint8_t>(i * 2654435761u >> 13);
    EXPECT(std::fwrite(bytes.data(), 1, size, file) == size && std::fflush(file) == 0);
  }
  ~Bytefile() { std::fclose(file); }
  int fd() const { return fileno(file); }
};

void every_byte_arrives(const Bytefile& from) {
  ReadPool pool(3);
  for (int parts : {1, 2, 5}) {
    std::vector<Bytes> into(7);
    std::vector<Read> reads;
    for (size_t i = 0; i < into.size(); ++i) {
      into[i].resize(i * 10000);
      reads.push_back({from.fd(), static_cast<int64_t>(i * 37), into[i].size(), into[i].data()});
    }
    auto batch = pool.submit(reads, parts, 4096);
    EXPECT(batch.wait().empty() && batch.done());
    for (size_t i = 0; i < into.size(); ++i)
      EXPECT(std::equal(into[i].begin(), into[i].end(), from.bytes.begin() + static_cast<int64_t>(i * 37)));
  }
  EXPECT(pool.counters().bytes == 3 * 210000 && pool.counters().retries == 0);
}

void a_fault_is_retried_once_then_reported(const Bytefile& from) {
  std::atomic<int> faults{1};
  ReadPool pool(2, [&](int fd, void* into, size_t bytes, off_t offset) -> ssize_t {
    if (offset < 500 && faults.fetch_sub(1) > 0) {
      errno = EIO;
      return -1;
    }
    return ::pread(fd, into, std::min<size_t>(bytes, 999), offset);
  });
  Bytes first(3000), second(3000);
  const std::vector<Read> reads{{from.fd(), 0, 3000, first.data()}, {from.fd(), 5000, 3000, second.data()}};
  EXPECT(pool.submit(reads).wait().empty() && pool.counters().retries == 1);
  EXPECT(std::equal(first.begin(), first.end(), from.bytes.begin()));

  faults = 2;
  auto failed = pool.submit(reads);
  EXPECT(failed.wait().size() == 1 && failed.wait()[0].index == 0 && failed.wait()[0].error == EIO);

  Bytes beyond(3000);
  auto ended = pool.submit({{from.fd(), static_cast<int64_t>(size) - 1000, 3000, beyond.data()}});
  EXPECT(ended.wait().size() == 1 && ended.wait()[0].error == 0 && ended.wait()[0].done == 1000);
}

void reads_are_told_of_in_order_while_others_are_in_flight(const Bytefile& from) {
  ReadPool pool(3);
  for (int round = 0; round < 50; ++round) {
    std::vector<Bytes> into(4, Bytes(5000));
    std::vector<Read> reads;
    for (size_t i = 0; i < into.size(); ++i) reads.push_back({from.fd(), static_cast<int64_t>(i), 5000, into[i].data()});
    auto batch = pool.submit(reads, 2, 1024);
    for (size_t told = 0; told < into.size();) {
      const size_t ended = batch.wait_first(told + 1, 60).first;
      EXPECT(ended > told && ended <= into.size());
      for (; told < ended; ++told)
        EXPECT(std::equal(into[told].begin(), into[told].end(), from.bytes.begin() + static_cast<int64_t>(told)));
    }
  }
  Bytes beyond(3000), whole(3000);
  auto failing = pool.submit({{from.fd(), 0, 3000, whole.data()}, {from.fd(), size, 3000, beyond.data()}});
  EXPECT(failing.wait().size() == 1 && failing.wait_first(1, 60).second);
}

void batches_from_many_threads_do_not_mix(const Bytefile& from) {
  ReadPool pool(3);
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (int64_t caller = 0; caller < 4; ++caller)
    callers.emplace_back([&, caller] {
      for (int64_t round = 0; round < 50; ++round) {
        Bytes into(20000);
        auto batch = pool.submit({{from.fd(), caller * 1000 + round, into.size(), into.data()}}, 3, 1024);
        wrong += !batch.wait().empty() || !std::equal(into.begin(), into.end(), from.bytes.begin() + caller * 1000 + round);
      }
    });
  for (auto& caller : callers) caller.join();
  EXPECT(wrong == 0);
}

void a_closed_pool_opens_again(const Bytefile& from) {
  ReadPool pool(2);
  for (int round = 0; round < 3; ++round) {
    Bytes into(1000);
    { const auto dropped = pool.submit({{from.fd(), 0, into.size(), into.data()}}); }
    EXPECT(std::equal(into.begin(), into.end(), from.bytes.begin()));
    pool.close();
  }
}

void a_cancelled_batch_ends_with_what_was_begun(const Bytefile& from) {
  std::atomic<bool> begun{false}, go_on{false};
  ReadPool pool(1, [&](int fd, void* into, size_t bytes, off_t offset) {
    begun = true;
    while (!go_on) std::this_thread::yield();
    return ::pread(fd, into, bytes, offset);
  });
  std::vector<Bytes> into(3, Bytes(1000));
  std::vector<Read> reads;
  for (auto& bytes : into) reads.push_back({from.fd(), 0, bytes.size(), bytes.data()});
  auto batch = pool.submit(reads);
  while (!begun) std::this_thread::yield();
  batch.cancel();
  EXPECT(batch.wait_first(1, 0.001) == std::make_pair(size_t{0}, false));
  go_on = true;
  const auto& failed = batch.wait();
  EXPECT(failed.size() == 2 && failed[0].index == 1 && failed[0].error == ECANCELED && failed[1].index == 2);
  EXPECT(pool.counters().reads == 1);
}

void a_clock_runs_while_its_own_reads_are_in_flight(const Bytefile& from) {
  ReadPool pool(4, [](int fd, void* into, size_t bytes, off_t offset) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    return ::pread(fd, into, bytes, offset);
  });
  const auto clock = std::make_shared<ReadClock>();
  Bytes first(4000), second(4000);
  {
    auto mine = pool.submit({{from.fd(), 0, first.size(), first.data()}}, 2, 1024, clock);
    auto others = pool.submit({{from.fd(), 0, second.size(), second.data()}}, 2, 1024);
    EXPECT(mine.wait().empty() && others.wait().empty());
  }
  const double ran = clock->seconds();
  EXPECT(ran >= 0.02 && pool.counters().busy_seconds >= ran);
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT(clock->seconds() == ran);
}

}  // namespace

int main() {
  const Bytefile from;
  every_byte_arrives(from);
  reads_are_told_of_in_order_while_others_are_in_flight(from);
  a_fault_is_retried_once_then_reported(from);
  batches_from_many_threads_do_not_mix(from);
  a_closed_pool_opens_again(from);
  a_cancelled_batch_ends_with_what_was_begun(from);
  a_clock_runs_while_its_own_reads_are_in_flight(from);
  return failures != 0;
}
