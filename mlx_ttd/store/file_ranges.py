"""Bounded reads at an offset, and keeping bulk passes over large files out of the page cache."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import StoreError, TTDError
from ..spec import STRIDE_UNIT, align, open_regular

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
        fd = open_regular(path)
    except OSError as failure:
        raise error(f"{path} cannot be opened: {failure.strerror}.") from None
    try:
        yield fd
    finally:
        os.close(fd)


def block_buffer(nbytes: int = BLOCK_BYTES) -> memoryview:
    """Memory for `ranges` with blocks of `nbytes`: at a page, and with room for what precedes an unaligned offset.

    In huge pages where there are any: a direct read is described to the disk page by page.
    """
    memory = mmap.mmap(-1, align(nbytes, PAGE) + PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def ranges(
    path: Path,
    offset: int,
    nbytes: int,
    what: str,
    error: type[TTDError] = StoreError,
    buffer: memoryview | None = None,
) -> Iterator[memoryview]:
    """Read a range in blocks through one reused buffer, past the page cache; each block is valid until the next."""
    buffer = block_buffer(min(BLOCK_BYTES, nbytes)) if buffer is None else buffer
    block = max(PAGE, len(buffer) - PAGE)
    with opened(path, error) as plain, direct(path, plain) as fd:
        for at in range(offset, offset + nbytes, block):
            size = min(block, offset + nbytes - at)
            lead = read_around((fd, plain), buffer, at, size, path, what, error)
            yield buffer[lead : lead + size]


def read_around(
    fds: tuple[int, int], buffer: memoryview, offset: int, nbytes: int, path: Path, what: str, error: type[TTDError]
) -> int:
    """Read a range and the rest of its pages by the first descriptor or else the second, past the page cache.

    `buffer` starts at a page; returns where in it the range starts.
    """
    lead = offset % PAGE
    view = buffer[: align(lead + nbytes, PAGE)]
    for fd in fds:
        try:
            read_into(fd, view, offset - lead, path, what, error, lead + nbytes)
        except error:
            if fd == fds[-1]:
                raise
        else:
            break
    if fd == fds[-1]:
        drop_cached(fd, offset - lead, len(view))
    return lead


@contextmanager
def direct(path: Path, plain: int) -> Iterator[int]:
    """A descriptor for direct reads, which leave the CPU to who uses the bytes; `plain` where there are none."""
    try:
        fd = open_regular(path, os.O_DIRECT)
    except (AttributeError, OSError):
        pass_by_cache(plain)
        yield plain
        return
    try:
        yield fd
    finally:
        os.close(fd)
