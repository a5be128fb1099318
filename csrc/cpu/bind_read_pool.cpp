#include "bindings.h"
#include "read_pool.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace nb = nanobind;

namespace ttd {
namespace {

// The bytes of a Python buffer, held in place until it is released.
class Writable {
 public:
  explicit Writable(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS) != 0) throw nb::python_error();
  }
  Writable(Writable&& other) noexcept : view_(other.view_) { other.view_.obj = nullptr; }
  Writable& operator=(Writable&&) = delete;
  ~Writable() { PyBuffer_Release(&view_); }

  void* data() const { return view_.buf; }
  size_t bytes() const { return static_cast<size_t>(view_.len); }

 private:
  Py_buffer view_;
};

// A batch and the buffers it fills. Its reads end before the buffers are let go.
struct Batch {
  std::vector<Writable> buffers;
  ReadBatch reads;

  ~Batch() {
    nb::gil_scoped_release release;
    reads.wait();
  }
};

// Shared with reads in flight, so that no thread of theirs ever lets go of a Python object.
struct Clock {
  std::shared_ptr<ReadClock> held = std::make_shared<ReadClock>();
};

// Its threads may be waiting for Python's lock to ask `fault`, so it must not be held while they end.
struct Pool : ReadPool {
  using ReadPool::ReadPool;
  ~Pool() {
    nb::gil_scoped_release release;
    close();
  }
};

using Failures = std::vector<std::tuple<size_t, int, size_t>>;

Failures wait(Batch& batch) {
  Failures out;
  nb::gil_scoped_release release;
  for (const auto& failure : batch.reads.wait()) out.emplace_back(failure.index, failure.error, failure.done);
  return out;
}

std::pair<size_t, bool> wait_first(Batch& batch, size_t count, double seconds) {
  nb::gil_scoped_release release;
  return batch.reads.wait_first(count, seconds);
}

Batch* submit(Pool& pool, const std::vector<std::tuple<int, int64_t, nb::object>>& reads, int parts, const Clock* clock) {
  require(parts >= 1, "A read has at least one part.");
  std::vector<Writable> buffers;
  std::vector<Read> list;
  for (const auto& [fd, offset, into] : reads) {
    require(offset >= 0, "A read's offset cannot be negative.");
    const Writable& buffer = buffers.emplace_back(into);
    list.push_back({fd, offset, buffer.bytes(), buffer.data()});
  }
  auto held = clock ? clock->held : nullptr;
  // Buffers are let go with Python's lock held, also where nothing could be started.
  ReadBatch started = [&] {
    nb::gil_scoped_release release;
    return pool.submit(list, parts, 16384, std::move(held));
  }();
  return new Batch{std::move(buffers), std::move(started)};
}

// A pread that asks Python first: it returns the most bytes that this read may get, or -errno to fail.
ReadPool::Pread faulty(nb::object fault) {
  auto* kept = new nb::object(std::move(fault));
  std::shared_ptr<nb::object> shared(kept, [](nb::object* object) {
    nb::gil_scoped_acquire acquire;
    delete object;
  });
  return [shared](int fd, void* into, size_t bytes, off_t offset) -> ssize_t {
    int64_t most;
    {
      nb::gil_scoped_acquire acquire;
      most = nb::cast<int64_t>((*shared)(fd, static_cast<int64_t>(offset), bytes));
    }
    if (most >= 0) return ::pread(fd, into, std::min(bytes, static_cast<size_t>(most)), offset);
    errno = static_cast<int>(-most);
    return -1;
  };
}

}  // namespace

void bind_read_pool(nb::module_& m) {
  nb::class_<Batch>(m, "ReadBatch", "Reads under way together; letting go of it waits for them.")
      .def("wait", wait, "Wait for every byte: a list of (index of the read, errno or 0 for a file that ended, bytes read) that failed twice.")
      .def("wait_first", wait_first, nb::arg("count"), nb::arg("seconds"),
           "Wait until the first `count` reads have ended, or so long: how many, in order, have by now, and whether any has failed.")
      .def("cancel", [](Batch& batch) { batch.reads.cancel(); }, "Let reads that no thread has begun fail with ECANCELED.")
      .def_prop_ro("done", [](const Batch& batch) { return batch.reads.done(); }, "Whether wait would return at once.");
  nb::class_<Clock>(m, "ReadClock", "Time with at least one read in flight, of the batches that it is given to.")
      .def(nb::init<>())
      .def_prop_ro("seconds", [](const Clock& clock) { return clock.held->seconds(); }, "So far, overlapping reads counted once.");
  nb::class_<Pool>(m, "ReadPool", "Threads that read into buffers; they start with the first batch.")
      .def("__init__", [](Pool* self, int threads, nb::object fault) {
        require(threads >= 1, "A read pool has at least one thread.");
        new (self) Pool(threads, fault.is_none() ? ReadPool::Pread() : faulty(std::move(fault)));
      }, nb::arg("threads"), nb::arg("fault").none() = nb::none(),
         "fault, for tests: called with (fd, offset, bytes), it returns the most bytes to read, or -errno to fail.")
      .def("submit", submit, nb::arg("reads"), nb::arg("parts") = 1, nb::arg("clock").none() = nb::none(),
           "Start reads (fd, offset, writable buffer to fill), each in up to `parts` parts cut at multiples of 16,384 bytes. "
           "`clock` runs until the last has ended.")
      .def("counters", [](const Pool& pool) {
        const ReadCounters c = pool.counters();
        return std::make_tuple(c.reads, c.bytes, c.retries, c.busy_seconds);
      }, "(reads, bytes, retries, seconds with a read in flight) so far.")
      .def("close", [](Pool& pool) { pool.close(); }, nb::call_guard<nb::gil_scoped_release>(), "Finish what was submitted and end the threads.");
}

}  // namespace ttd
