"""The native read pool: every byte where it belongs, faults retried once, buffers that cannot go away too early."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from mlx_ttd.kernels.native import extension
from mlx_ttd.observe import Counters
from mlx_ttd.streaming import ReadPool, ReadThreads
from mlx_ttd.streaming.read_pool import Read

native = extension()
pytestmark = pytest.mark.skipif(native is None, reason="needs the native part and a CPU")
CONTENT = np.random.default_rng(0).integers(0, 256, 200_000, dtype=np.uint8)


@pytest.fixture
def fd(tmp_path):
    path = tmp_path / "bytes"
    CONTENT.tofile(path)
    fd = os.open(path, os.O_RDONLY)
    yield fd
    os.close(fd)


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_every_byte_arrives(fd, parts):
    pool = native.ReadPool(3)
    into = [np.zeros(size, np.uint8) for size in (0, 1, 16_384, 50_000, 100_001)]
    batch = pool.submit([(fd, 7 * i, buffer) for i, buffer in enumerate(into)], parts)
    assert batch.wait() == []
    assert batch.done
    assert all((buffer == CONTENT[7 * i : 7 * i + len(buffer)]).all() for i, buffer in enumerate(into))
    assert pool.counters()[1:3] == (sum(map(len, into)), 0)
    pool.close()


def test_a_fault_is_retried_once(fd):
    faults = [-errno.EIO]
    pool = native.ReadPool(1, lambda fd, offset, size: faults.pop() if faults else size)
    into = np.zeros(1000, np.uint8)
    assert pool.submit([(fd, 0, into)]).wait() == []
    assert (into == CONTENT[:1000]).all()
    assert pool.counters()[2] == 1
    faults.extend([-errno.EIO] * 2)
    assert pool.submit([(fd, 0, into), (fd, 500, into)]).wait() == [(0, errno.EIO, 0)]


def test_short_reads_go_on_and_the_end_of_the_file_is_told(fd):
    pool = native.ReadPool(2, lambda fd, offset, size: 333)
    into = np.zeros(5000, np.uint8)
    assert pool.submit([(fd, 100, into)]).wait() == []
    assert (into == CONTENT[100:5100]).all()
    assert pool.submit([(fd, len(CONTENT) - 600, into)]).wait() == [(0, 0, 600)]


def test_memory_that_cannot_be_written_is_refused_before_any_read(fd):
    pool = native.ReadPool(1)
    with pytest.raises((BufferError, ValueError)):
        pool.submit([(fd, 0, b"constant")])
    with pytest.raises(ValueError, match="offset"):
        pool.submit([(fd, -1, bytearray(8))])
    assert pool.counters()[0] == 0


def test_a_buffer_stays_while_it_is_read_into(fd):
    buffer = bytearray(100_000)
    batch = native.ReadPool(1, lambda fd, offset, size: min(size, 1000)).submit([(fd, 0, buffer)])
    with pytest.raises(BufferError):
        buffer.clear()
    batch.wait()
    del batch
    assert buffer == CONTENT[:100_000].tobytes()
    buffer.clear()


class SlowThreads(ReadThreads):
    """Native threads whose reads take `seconds` each."""

    def __init__(self, depth, seconds):
        super().__init__(depth)
        self._native = native.ReadPool(depth, lambda fd, offset, size: time.sleep(seconds) or size)


def read(fd):
    return Read(fd, 0, memoryview(bytearray(100)))


def test_a_read_is_in_flight_until_it_ends_not_until_it_is_waited_for(fd):
    pool = ReadPool(2, 1, Counters(), threads=SlowThreads(2, 0.02))
    start = time.perf_counter()
    batch = pool.submit([read(fd)])
    while not batch._native.done:
        time.sleep(0.001)
    ended = time.perf_counter()
    time.sleep(0.2)
    batch.wait()
    assert 0.02 <= pool.counters.read_seconds <= ended - start
    pool.close()


def test_reads_that_overlap_are_timed_once_in_any_order_and_models_apart(fd):
    threads = SlowThreads(8, 0.3)
    pool, other = (ReadPool(8, 1, Counters(), threads=threads) for _ in range(2))
    start = time.perf_counter()
    batches = [pool.submit([read(fd), read(fd)]) for _ in range(3)]
    for batch in reversed(batches):
        batch.wait()
    assert 0.3 <= pool.counters.read_seconds <= time.perf_counter() - start
    assert other.counters.read_seconds == 0
    other.submit([read(fd)]).wait()
    assert other.counters.read_seconds >= 0.3
    assert pool.counters.bytes_read == 600
    pool.close()
    other.close()


def test_reads_are_told_of_in_order_as_they_end(fd):
    go_on = threading.Event()

    def fault(fd, offset, size):
        assert offset == 0 or go_on.wait(10)
        return size

    pool = native.ReadPool(2, fault)
    batch = pool.submit([(fd, 7 * i, np.zeros(1000, np.uint8)) for i in range(3)])
    assert batch.wait_first(1, 10) == (1, False)
    assert batch.wait_first(3, 0.01) == (1, False)
    go_on.set()
    assert batch.wait_first(3, 10) == (3, False)
    assert batch.wait() == []


def test_a_cancelled_batch_ends_with_what_was_begun(fd):
    begun, go_on = threading.Event(), threading.Event()

    def fault(fd, offset, size):
        begun.set()
        assert go_on.wait(10)
        return size

    pool = native.ReadPool(1, fault)
    batch = pool.submit([(fd, 0, np.zeros(1000, np.uint8)) for _ in range(3)])
    assert begun.wait(10)
    batch.cancel()
    go_on.set()
    assert batch.wait() == [(1, errno.ECANCELED, 0), (2, errno.ECANCELED, 0)]
    assert pool.counters()[0] == 1


def test_a_failed_read_is_told_of_at_once(fd):
    counters = Counters()
    pool = ReadPool(1, 1, counters)
    into = np.zeros(1000, np.uint8)
    batch = pool.submit([Read(fd, 0, into.data), Read(fd, len(CONTENT) - 600, into.data), Read(fd, 0, into.data)])
    with pytest.raises(OSError, match="the file ends 400 bytes short"):
        list(iter(batch.some, None))
    batch.drain()
    assert counters.bytes_read == 2600
    pool.close()


def test_a_forked_child_may_let_go_of_its_parents_pool(fd):
    program = """
import os, sys
from mlx_ttd.kernels.native import extension
pool = extension().ReadPool(2)
with open(sys.argv[1], "rb") as file:
    pool.submit([(file.fileno(), 0, bytearray(4096))]).wait()
for close in (True, False):
    child = os.fork()
    if child == 0:
        if close:
            pool.close()
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""
    done = subprocess.run(
        [sys.executable, "-c", program, os.readlink(f"/proc/self/fd/{fd}")], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_pool_that_is_closed_while_reads_are_submitted_goes_on(fd):
    entered, go_on = threading.Event(), threading.Event()

    def slow(fd, offset, count):
        entered.set()
        go_on.wait(30)
        return count

    pool = native.ReadPool(1, slow)
    batches = [pool.submit([(fd, 0, bytearray(4096))])]
    entered.wait(30)
    closing = threading.Thread(target=pool.close)
    closing.start()
    time.sleep(0.1)
    submitting = threading.Thread(target=lambda: batches.append(pool.submit([(fd, 0, bytearray(4096))])))
    submitting.start()
    time.sleep(0.1)
    go_on.set()
    closing.join(30)
    submitting.join(30)
    batches.append(pool.submit([(fd, 0, bytearray(4096))]))
    waiting = threading.Thread(target=lambda: [batch.wait() for batch in batches], daemon=True)
    waiting.start()
    waiting.join(30)
    assert not waiting.is_alive()
    assert len(batches) == 3


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space as Linux does")
def test_reads_that_no_thread_can_be_started_for_are_forgotten(fd):
    program = """
import resource, sys
from mlx_ttd.kernels.native import extension
pool, into, other = extension().ReadPool(8), bytearray(4096), bytearray(4096)
file = open(sys.argv[1], "rb")
with open("/proc/self/statm") as held:
    resource.setrlimit(resource.RLIMIT_AS, (int(held.read().split()[0]) * resource.getpagesize() + 1_000_000, -1))
try:
    pool.submit([(file.fileno(), 0, into)])
except RuntimeError:
    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
    into.append(0)
    pool.submit([(file.fileno(), 0, other)]).wait()
    print(any(into), any(other))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, os.readlink(f"/proc/self/fd/{fd}")], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout.strip(), done.stderr) == ("False True", "")


def test_an_interrupt_waits_for_the_checks_that_may_read_again(fd):
    checking = threading.Event()

    def differs(view):
        checking.set()
        time.sleep(0.3)
        return "its bytes differ"

    pool, into = ReadPool(2, 1, Counters()), [bytearray(65_536) for _ in range(2)]
    batch = pool.submit([Read(fd, 0, memoryview(buffer), differs) for buffer in into])
    main = threading.get_ident()
    sender = threading.Thread(target=lambda: checking.wait(30) and signal.pthread_kill(main, signal.SIGINT))
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        sender.start()
        with pytest.raises(KeyboardInterrupt):
            batch.wait()
    finally:
        signal.signal(signal.SIGINT, previous)
        sender.join(30)
    batch.drain()
    for buffer in into:
        buffer[:] = bytes(len(buffer))
    time.sleep(0.8)
    assert not any(map(any, into))
