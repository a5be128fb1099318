"""Bounded reads at an offset, and keeping bulk passes over large files out of the page cache."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ..errors import StoreError, TTDError
from ..spec import STRIDE_UNIT, align

CALL_BYTES = 1 << 30
BLOCK_BYTES, PAGE = 4 << 20, STRIDE_UNIT


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
    fd: int,
    buffer: memoryview,
    offset: int,
    path: Path,
    what: str,
    error: type[TTDError] = StoreError,
    needed: int | None = None,
) -> None:
    """Fill `buffer` from `offset` of an open file; a short read or I/O error raises `error` naming file and `what`.

    The file may end after the first `needed` bytes, if that is given.
    """
    done = 0
    try:
        while done < (len(buffer) if needed is None else needed):
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
    buffer = memoryview(mmap.mmap(-1, align(min(block, nbytes) + PAGE, PAGE)))
    with opened(path, error) as plain, _direct(path, buffer, plain) as fd:
        for at in range(offset, offset + nbytes, block):
            size, lead = min(block, offset + nbytes - at), at % PAGE
            view = buffer[: align(lead + size, PAGE)]
            read_into(fd, view, at - lead, path, what, error, lead + size)
            yield view[lead : lead + size]
            if fd == plain:
                drop_cached(fd, at, size)


@contextmanager
def _direct(path: Path, buffer: memoryview, plain: int) -> Iterator[int]:
    """A descriptor for direct reads, which leave the CPU to who uses the bytes; `plain` where there are none."""
    if not hasattr(os, "O_DIRECT"):
        pass_by_cache(plain)
        yield plain
        return
    with ExitStack() as stack:
        fd = plain
        with suppress(OSError):
            direct = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
            stack.callback(os.close, direct)
            os.preadv(direct, [buffer[:PAGE]], 0)
            fd = direct
        yield fd
