"""Bounded reads at an offset, and keeping bulk passes over large files out of the page cache."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import StoreError, TTDError

CALL_BYTES = 1 << 30
BLOCK_BYTES = 4 << 20


def pass_by_cache(fd: int) -> None:
    """Keep traffic on `fd` out of the page cache (macOS; on Linux `drop_cached` does it afterwards)."""
    if sys.platform == "darwin":
        import fcntl

        fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)


def drop_cached(fd: int, offset: int, nbytes: int) -> None:
    """Drop the clean cached pages of a range that will not be read again soon."""
    if hasattr(os, "posix_fadvise") and nbytes:
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


def read_into(
    fd: int, buffer: memoryview, offset: int, path: Path, what: str, error: type[TTDError] = StoreError
) -> None:
    """Fill `buffer` from `offset` of an open file; a short read or I/O error raises `error` naming file and `what`."""
    done = 0
    try:
        while done < len(buffer):
            count = os.preadv(fd, [buffer[done : done + CALL_BYTES]], offset + done)
            if count == 0:
                raise error(
                    f"{path} ends inside {what}: {done:,} of {len(buffer):,} bytes at {offset:,}; it is cut short."
                )
            done += count
    except OSError as failure:
        raise error(f"{path}: reading {what} failed: {failure.strerror}.") from None


@contextmanager
def opened(path: Path, error: type[TTDError] = StoreError) -> Iterator[int]:
    """A read-only descriptor of `path`, closed on exit."""
    try:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    except OSError as failure:
        raise error(f"{path} cannot be opened: {failure.strerror}.") from None
    try:
        yield fd
    finally:
        os.close(fd)


def ranges(
    path: Path, offset: int, nbytes: int, what: str, error: type[TTDError] = StoreError, block: int = BLOCK_BYTES
) -> Iterator[memoryview]:
    """Read a range in blocks through one reused buffer, past the page cache; each block is valid until the next."""
    buffer = memoryview(bytearray(min(block, nbytes)))
    with opened(path, error) as fd:
        pass_by_cache(fd)
        for start in range(0, nbytes, block):
            view = buffer[: min(block, nbytes - start)]
            read_into(fd, view, offset + start, path, what, error)
            yield view
            drop_cached(fd, offset + start, len(view))
