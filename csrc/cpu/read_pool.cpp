#include "read_pool.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>

namespace ttd {

struct ReadBatch::Shared {
  mutable std::mutex mutex;
  std::condition_variable finished;
  std::atomic<bool> cancelled = false;
  size_t unfinished = 0;
  std::vector<size_t> parts_left;  // of each read
  size_t ended = 0;                // reads before the first that has not
  std::vector<ReadFailure> failures;

  void skip_ended() {
    while (ended < parts_left.size() && parts_left[ended] == 0) ++ended;
  }
};

ReadBatch::~ReadBatch() {
  if (shared_) wait();
}

bool ReadBatch::done() const {
  std::lock_guard lock(shared_->mutex);
  return shared_->unfinished == 0;
}

std::pair<size_t, bool> ReadBatch::wait_first(size_t count, double seconds) {
  std::unique_lock lock(shared_->mutex);
  shared_->finished.wait_for(lock, std::chrono::duration<double>(seconds),
                             [&] { return shared_->ended >= count || !shared_->failures.empty() || shared_->unfinished == 0; });
  return {shared_->ended, !shared_->failures.empty()};
}

void ReadBatch::cancel() { shared_->cancelled = true; }

const std::vector<ReadFailure>& ReadBatch::wait() {
  std::unique_lock lock(shared_->mutex);
  shared_->finished.wait(lock, [&] { return shared_->unfinished == 0; });
  return shared_->failures;
}

void ReadClock::begin(size_t reads) {
  std::lock_guard lock(mutex_);
  if (in_flight_ == 0) since_ = Clock::now();
  in_flight_ += reads;
}

void ReadClock::end() {
  std::lock_guard lock(mutex_);
  if (--in_flight_ == 0) seconds_ += std::chrono::duration<double>(Clock::now() - since_).count();
}

double ReadClock::seconds() const {
  std::lock_guard lock(mutex_);
  return in_flight_ == 0 ? seconds_ : seconds_ + std::chrono::duration<double>(Clock::now() - since_).count();
}

namespace {

struct Part {
  Read read;
  size_t index, start;  // of the whole read, and where in it this part begins
  std::shared_ptr<ReadBatch::Shared> batch;
  std::shared_ptr<ReadClock> clock;
};

// Reads until all bytes are there, the file ends or an error comes up.
size_t read_fully(const ReadPool::Pread& pread, const Read& read, int* error) {
  size_t done = 0;
  *error = 0;
  while (done < read.bytes) {
    const ssize_t got = pread(read.fd, static_cast<char*>(read.into) + done, read.bytes - done, read.offset + static_cast<off_t>(done));
    if (got > 0) {
      done += static_cast<size_t>(got);
    } else if (got == 0) {
      break;
    } else if (errno != EINTR) {
      *error = errno;
      break;
    }
  }
  return done;
}

}  // namespace

struct ReadPool::State {
  const size_t depth;
  const Pread pread;
  const pid_t process = getpid();
  std::mutex mutex;
  std::condition_variable wake, closed;
  std::deque<Part> queue;
  std::vector<std::thread> workers;
  bool closing = false;
  ReadClock clock;
  ReadCounters counters;

  State(size_t threads, Pread with) : depth(threads), pread(std::move(with)) {}

  void work() {
    std::unique_lock lock(mutex);
    for (;;) {
      wake.wait(lock, [&] { return closing || !queue.empty(); });
      if (queue.empty()) return;
      Part part = std::move(queue.front());
      queue.pop_front();
      lock.unlock();
      int error = 0;
      const bool begun = !part.batch->cancelled;
      size_t done = 0;
      if (begun) {
        done = read_fully(pread, part.read, &error);
      } else {
        error = ECANCELED;
      }
      size_t bytes = done;
      const bool retried = begun && done < part.read.bytes;
      if (retried) bytes += done = read_fully(pread, part.read, &error);
      if (part.clock) part.clock->end();
      clock.end();
      lock.lock();
      counters.reads += begun;
      counters.retries += retried;
      counters.bytes += static_cast<int64_t>(bytes);
      lock.unlock();
      finish(part, done, error);
      lock.lock();
    }
  }

  static void finish(const Part& part, size_t done, int error) {
    ReadBatch::Shared& batch = *part.batch;
    std::lock_guard lock(batch.mutex);
    if (done < part.read.bytes) batch.failures.push_back({part.index, error, part.start + done});
    if (--batch.parts_left[part.index] == 0) batch.skip_ended();
    if (--batch.unfinished > 0) {
      batch.finished.notify_all();
      return;
    }
    std::sort(batch.failures.begin(), batch.failures.end(), [](const ReadFailure& a, const ReadFailure& b) {
      return a.index != b.index ? a.index < b.index : a.done < b.done;
    });
    const auto same = [](const ReadFailure& a, const ReadFailure& b) { return a.index == b.index; };
    batch.failures.erase(std::unique(batch.failures.begin(), batch.failures.end(), same), batch.failures.end());
    batch.finished.notify_all();
  }
};

ReadPool::ReadPool(int threads, Pread pread)
    : state_(std::make_shared<State>(static_cast<size_t>(std::max(1, threads)), pread ? std::move(pread) : Pread(::pread))) {}

ReadPool::~ReadPool() { close(); }

ReadBatch ReadPool::submit(const std::vector<Read>& reads, int parts, size_t unit, std::shared_ptr<ReadClock> clock) {
  leave_parents_state();
  auto batch = std::make_shared<ReadBatch::Shared>();
  batch->parts_left.resize(reads.size());
  std::deque<Part> queue;
  for (size_t i = 0; i < reads.size(); ++i) {
    const Read& read = reads[i];
    const size_t share = (read.bytes + static_cast<size_t>(parts) - 1) / static_cast<size_t>(parts);
    const size_t step = std::max<size_t>(1, (share + unit - 1) / unit * unit);
    for (size_t at = 0; at < read.bytes; at += step) {
      const size_t bytes = std::min(step, read.bytes - at);
      const Read part{read.fd, read.offset + static_cast<int64_t>(at), bytes, static_cast<char*>(read.into) + at};
      queue.push_back({part, i, at, batch, clock});
      ++batch->parts_left[i];
    }
  }
  batch->unfinished = queue.size();
  batch->skip_ended();
  if (queue.empty()) return ReadBatch(std::move(batch));
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  state.closed.wait(lock, [&] { return !state.closing; });
  // Threads first: where there are none, nothing may be left in the queue. A few do where there cannot be more.
  while (state.workers.size() < state.depth) {
    try {
      state.workers.emplace_back([&state] { state.work(); });
    } catch (const std::system_error&) {
      if (state.workers.empty()) throw;
      break;
    }
  }
  state.clock.begin(queue.size());
  if (clock) clock->begin(queue.size());
  for (auto& part : queue) state.queue.push_back(std::move(part));
  state.wake.notify_all();
  return ReadBatch(std::move(batch));
}

ReadCounters ReadPool::counters() const {
  std::lock_guard lock(state_->mutex);
  ReadCounters counters = state_->counters;
  counters.busy_seconds = state_->clock.seconds();
  return counters;
}

void ReadPool::close() {
  leave_parents_state();
  std::vector<std::thread> workers;
  {
    std::unique_lock lock(state_->mutex);
    state_->closed.wait(lock, [&] { return !state_->closing; });
    state_->closing = true;
    workers.swap(state_->workers);
  }
  state_->wake.notify_all();
  for (auto& worker : workers) worker.join();
  std::lock_guard lock(state_->mutex);
  state_->closing = false;
  state_->closed.notify_all();
}

// A forked child has none of the threads, and a lock may be held for ever: what the parent had is left alone.
void ReadPool::leave_parents_state() {
  if (state_->process == getpid()) return;
  auto* left = new std::shared_ptr<State>(state_);
  state_ = std::make_shared<State>((*left)->depth, (*left)->pread);
}

}  // namespace ttd
