"""Parallel positional reads into memory that is already there."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..observe import Counters, cancel_point
from ..spec import open_regular
from .read_threads import ReadThreads, native_clock

PART_UNIT = 16_384
# How long a wait for reads goes on before it looks whether it is still wanted.
PATIENCE_SECONDS = 0.05


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
        return open_regular(path)
    if sys.platform == "darwin":
        import fcntl

        fd = open_regular(path)
        fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)
        return fd
    return open_regular(path, os.O_DIRECT)


def _outcome(future: Future[None]) -> BaseException | None:
    """What `future` ended with, waited for from one cancel point to the next."""
    while not wait_for([future], PATIENCE_SECONDS).done:
        cancel_point()
    return future.exception()


def _let_end(futures: Sequence[Future[None]]) -> None:
    for future in futures:
        while not future.done():
            with suppress(BaseException):
                future.exception()


class Batch:
    """Reads in flight, each of them some futures. `wait` and `some` raise the first failure."""

    def __init__(self, pool: ReadPool, reads: list[list[Future[None]]]):
        self._pool, self._reads = pool, reads
        self._taken = 0

    def some(self) -> int:
        """Wait for the next read; how many, in order, have ended that no call told of."""
        end = self._taken + 1
        while end < len(self._reads) and all(future.done() for future in self._reads[end]):
            end += 1
        return self._take(end)

    def wait(self) -> None:
        """Wait for all."""
        self._take(len(self._reads))

    def _take(self, end: int) -> int:
        start = time.perf_counter()
        taken, self._taken = self._taken, end
        errors = [e for e in (_outcome(f) for read in self._reads[taken:end] for f in read) if e is not None]
        self._pool.counters.wait_seconds += time.perf_counter() - start
        if errors:
            raise errors[0]
        return end - taken

    def drain(self) -> None:
        """Give up what was not begun, and return when no read is in flight any more, whatever signal comes."""
        futures = [future for read in self._reads for future in read]
        self._pool.landed(sum(not future.cancelled() and future.cancel() for future in futures))
        _let_end(futures)


class NativeBatch:
    """Reads in flight on native threads, which try those that fail once more. As `Batch`."""

    def __init__(self, pool: ReadPool, reads: Sequence[Read], native: Any):
        self._pool, self._reads, self._native = pool, reads, native
        self._taken = 0

    def some(self) -> int:
        return self._take(self._ended(self._taken + 1))

    def wait(self) -> None:
        self._take(self._ended(len(self._reads)))

    def _ended(self, wanted: int) -> int:
        """How many reads, in order, have ended, once `wanted` have; raises where one has failed."""
        start = time.perf_counter()
        ended, failed = self._native.wait_first(wanted, PATIENCE_SECONDS)
        while ended < wanted and not failed:
            cancel_point()
            ended, failed = self._native.wait_first(wanted, PATIENCE_SECONDS)
        self._pool.counters.wait_seconds += time.perf_counter() - start
        if failed:
            raise self._failure(self._native.wait())
        return ended

    def _failure(self, failed: list[tuple[int, int, int]]) -> Exception:
        self._pool.count_seconds()
        got = {index: done for index, _, done in failed}
        left = enumerate(self._reads[self._taken :], self._taken)
        self._pool.counters.bytes_read += sum(got.get(i, len(read.into)) for i, read in left)
        index, error, done = failed[0]
        read = self._reads[index]
        short = f"the file ends {len(read.into) - done:,} bytes short"
        return read.fail(f"the read failed: {os.strerror(error)}" if error else short)

    def _take(self, end: int) -> int:
        reads, self._taken = self._reads[self._taken : end], end
        self._pool.count_seconds()
        self._pool.counters.bytes_read += sum(len(read.into) for read in reads)
        self._pool.finish(reads)
        return len(reads)

    def drain(self) -> None:
        """As `Batch.drain`."""
        self._native.cancel()
        while not self._native.done:
            with suppress(BaseException):
                self._native.wait()


class ReadPool:
    """Reads records, each split into `parts` aligned reads, on `threads` (own ones of `depth` unless given).

    The native part's threads read where there is one, unless `pread` stands in for the system's.
    """

    def __init__(
        self,
        depth: int,
        parts: int,
        counters: Counters,
        pread: Callable[[int, int, memoryview], int] | None = None,
        threads: ReadThreads | None = None,
    ):
        self.threads = threads or ReadThreads(depth)
        self.parts, self.counters = parts, counters
        self._pread = pread
        self._lock = threading.Lock()
        self._in_flight = 0
        self._since = 0.0
        self._clock: Any = None
        self._counted = 0.0

    def submit(self, reads: Sequence[Read]) -> Batch | NativeBatch:
        """Start `reads`. One that fails is tried once more; then `wait` raises its `fail(reason)`."""
        native = self.threads.native(self) if self._pread is None else None
        if native is not None:
            wanted = [(read.fd, read.offset, read.into) for read in reads]
            if self._clock is None:
                self._clock = native_clock()
            return NativeBatch(self, reads, native.submit(wanted, self.parts, self._clock))
        futures: list[list[Future[None]]] = []
        for read in reads:
            size = len(read.into)
            step = -(-size // self.parts // PART_UNIT) * PART_UNIT or size
            starts = range(0, size, step)
            read.unfinished = len(starts)
            with self._lock:
                if self._in_flight == 0:
                    self._since = time.perf_counter()
                self._in_flight += len(starts)
            futures.append([self.threads.submit(self, self._part, read, at, min(at + step, size)) for at in starts])
        return Batch(self, futures)

    def count_seconds(self) -> None:
        """Count the time that native reads were in flight since this was last done."""
        seconds = self._clock.seconds
        self.counters.read_seconds += seconds - self._counted
        self._counted = seconds

    def finish(self, reads: Sequence[Read]) -> None:
        """Check records that were read whole, side by side where there are several. Raises the first failure."""
        checked = [read for read in reads if read.check is not None]
        self.counters.records += len(reads) - len(checked)
        if len(checked) == 1:
            self._finish(checked[0])
            return
        # A record that fails is read again, so all must have ended before a failure or a signal lets go of their slots.
        # Futures of our own, since a signal may come between a hand-over and its future.
        futures: list[Future[None]] = [Future() for _ in checked]
        try:
            for read, future in zip(checked, futures, strict=True):
                self.threads.submit(self, self._finish_for, future, read)
            errors = [error for error in (future.exception() for future in futures) if error is not None]
        finally:
            for future in futures:
                future.cancel()
            _let_end(futures)
        if errors:
            raise errors[0]

    def landed(self, parts: int) -> None:
        """So many parts of reads are in flight no more."""
        with self._lock:
            self._in_flight -= parts
            if parts and self._in_flight == 0:
                self.counters.read_seconds += time.perf_counter() - self._since

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
            self.landed(1)

    def _finish_for(self, future: Future[None], read: Read) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            self._finish(read)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)

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
            got = (self._pread or pread_into)(read.fd, read.offset + start, read.into[start:stop])
        except OSError as error:
            return f"the read failed: {error.strerror or error}"
        with self._lock:
            self.counters.bytes_read += got
        return None if got == stop - start else f"the file ends {stop - start - got:,} bytes short"

    def close(self) -> None:
        """Leave the threads. No read may be in flight; the next `submit` comes back to them."""
        self.threads.leave(self)
