"""The native read pool: every byte where it belongs, faults retried once, buffers that cannot go away too early."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest

from mlx_ttd.kernels.native import extension

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
