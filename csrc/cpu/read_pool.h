// Positional reads in parallel, straight into memory that is already there.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace ttd {

struct Read {
  int fd;
  int64_t offset;
  size_t bytes;
  void* into;
};

// A read that failed twice: the errno, 0 where the file ends after `done` bytes, ECANCELED where it was not started.
struct ReadFailure {
  size_t index;
  int error;
  size_t done;
};

struct ReadCounters {
  int64_t reads = 0, bytes = 0, retries = 0;
  double busy_seconds = 0;  // while at least one read was in flight
};

// Time with at least one read in flight, of all reads that it is handed to. Overlapping reads count once.
class ReadClock {
 public:
  void begin(size_t reads);
  void end();
  double seconds() const;

 private:
  using Clock = std::chrono::steady_clock;
  mutable std::mutex mutex_;
  size_t in_flight_ = 0;
  Clock::time_point since_;
  double seconds_ = 0;
};

// Reads under way together. Its memory must stay until it is done; destroying a batch waits for that.
class ReadBatch {
 public:
  struct Shared;
  explicit ReadBatch(std::shared_ptr<Shared> shared) : shared_(std::move(shared)) {}
  ReadBatch(ReadBatch&&) = default;
  ReadBatch& operator=(ReadBatch&&) = delete;
  ~ReadBatch();

  bool done() const;
  // Waits until the first `count` reads have ended, or `seconds` long: how many, in order, have by now, and whether one
  // of any has failed.
  std::pair<size_t, bool> wait_first(size_t count, double seconds);
  void cancel();  // lets what no thread has begun fail instead
  const std::vector<ReadFailure>& wait();  // by index; empty when every byte was read

 private:
  std::shared_ptr<Shared> shared_;
};

// Threads that read; they start with the first batch. Descriptors may be cached or O_DIRECT, whose alignment rules then
// hold for offsets, lengths, addresses and `unit`.
class ReadPool {
 public:
  // What a read is done with: pread, or a test's stand-in that fails as it is told to.
  using Pread = std::function<ssize_t(int fd, void* into, size_t bytes, off_t offset)>;

  explicit ReadPool(int threads, Pread pread = {});
  ~ReadPool();  // finishes what was submitted
  ReadPool(const ReadPool&) = delete;
  ReadPool& operator=(const ReadPool&) = delete;

  // Starts `reads`, each as up to `parts` reads cut at multiples of `unit` bytes. A part that fails is tried once more.
  // `clock` runs until the last has ended, whenever that is waited for.
  ReadBatch submit(const std::vector<Read>& reads, int parts = 1, size_t unit = 16384, std::shared_ptr<ReadClock> clock = {});
  ReadCounters counters() const;
  void close();  // finishes what was submitted and ends the threads; the next batch starts new ones

 private:
  struct State;
  void leave_parents_state();
  std::shared_ptr<State> state_;
};

}  // namespace ttd
