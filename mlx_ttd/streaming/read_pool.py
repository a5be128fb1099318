"""Parallel positional reads into memory that is already there."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from ..observe import Counters

PART_UNIT = 16_384


@dataclass
class Read:
    """Fill `into` from byte `offset` of the descriptor. `check` gets the bytes and returns what is wrong, or None."""

    fd: int
    offset: int
    into: memoryview
    check: Callable[[memoryview], str | None] | None = None
    fail: Callable[[str], Exception] = OSError
    unfinished: int = 0
    reason: str | None = None


def pread_into(fd: int, offset: int, into: memoryview) -> int:
    """pread until `into` is full or the file ends; returns the bytes read."""
    done = 0
    while done < len(into):
        got = os.preadv(fd, [into[done:]], offset + done)
        if got == 0:
            break
        done += got
    return done


def open_for_reading(path: str | os.PathLike[str], direct: bool) -> int:
    """A descriptor of a file; direct: past the page cache, with aligned offsets, lengths and memory alone."""
    if not direct:
        return os.open(path, os.O_RDONLY)
    if sys.platform == "darwin":
        import fcntl

        fd = os.open(path, os.O_RDONLY)
        fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)
        return fd
    return os.open(path, os.O_RDONLY | os.O_DIRECT)


class Batch:
    """Reads in flight. `wait` returns when all are done and raises the first failure."""

    def __init__(self, futures: list[Future[None]], counters: Counters):
        self._futures, self._counters = futures, counters

    def wait(self) -> None:
        start = time.perf_counter()
        errors = [e for e in (f.exception() for f in self._futures) if e is not None]
        self._counters.wait_seconds += time.perf_counter() - start
        if errors:
            raise errors[0]

    def drain(self) -> None:
        """Return when no read is in flight any more, whatever became of them and whatever signal comes."""
        pending = list(self._futures)
        while pending:
            with suppress(BaseException):
                pending[-1].exception()
            if pending[-1].done():
                pending.pop()


class ReadPool:
    """`depth` threads that read records, each split into `parts` aligned reads. Threads start with the first read."""

    def __init__(
        self,
        depth: int,
        parts: int,
        counters: Counters,
        pread: Callable[[int, int, memoryview], int] = pread_into,
    ):
        self.depth, self.parts, self.counters = depth, parts, counters
        self._pread = pread
        self._lock = threading.Lock()
        self._in_flight = 0
        self._since = 0.0
        self._executor: ThreadPoolExecutor | None = None

    def submit(self, reads: Sequence[Read]) -> Batch:
        """Start `reads`. One that fails is tried once more, whole; then `Batch.wait` raises its `fail(reason)`."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(self.depth, thread_name_prefix="mlx_ttd-read")
        futures = []
        for read in reads:
            size = len(read.into)
            step = -(-size // self.parts // PART_UNIT) * PART_UNIT or size
            starts = range(0, size, step)
            read.unfinished = len(starts)
            with self._lock:
                if self._in_flight == 0:
                    self._since = time.perf_counter()
                self._in_flight += len(starts)
            futures += [self._executor.submit(self._part, read, at, min(at + step, size)) for at in starts]
        return Batch(futures, self.counters)

    def _part(self, read: Read, start: int, stop: int) -> None:
        try:
            reason = self._attempt(read, start, stop)
            with self._lock:
                read.reason = read.reason or reason
                read.unfinished -= 1
                last = read.unfinished == 0
            if last:
                self._finish(read)
        finally:
            with self._lock:
                self._in_flight -= 1
                if self._in_flight == 0:
                    self.counters.read_seconds += time.perf_counter() - self._since

    def _finish(self, read: Read) -> None:
        reason = read.reason or (read.check and read.check(read.into))
        if reason:
            reason = self._attempt(read, 0, len(read.into)) or (read.check and read.check(read.into))
        if reason:
            raise read.fail(reason)
        with self._lock:
            self.counters.records += 1

    def _attempt(self, read: Read, start: int, stop: int) -> str | None:
        try:
            got = self._pread(read.fd, read.offset + start, read.into[start:stop])
        except OSError as error:
            return f"the read failed: {error.strerror or error}"
        with self._lock:
            self.counters.bytes_read += got
        return None if got == stop - start else f"the file ends {stop - start - got:,} bytes short"

    def close(self) -> None:
        """Wait for reads in flight and end the threads; the next `submit` starts new ones."""
        if self._executor is not None:
            self._executor.shutdown(wait=True)
            self._executor = None
