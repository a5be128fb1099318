"""Huge pages under what a CPU reads over and over, on Linux."""

from __future__ import annotations

import ctypes
import errno
import sys
import time
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np

from .backend import device_kind

SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25
# A page is just being moved, or no huge page is free. Where page cache fills memory Linux makes more by compaction, but
# takes that up at every 64th request at the latest: asking on is what helps.
PASSING = (errno.EAGAIN, errno.ENOMEM)
# Asking on, copies included, may take as long as reading the bytes from a disk. The next array may use what is left.
BYTES_PER_SECOND = 1e9
_patience = 0.05


@cache
def huge_page_bytes() -> int:
    """Size of a huge page that memory can be moved to here; 0 where it cannot, or the system is set to never do it."""
    if sys.platform != "linux":
        return 0
    try:
        allowed = "[never]" not in (SETTINGS / "enabled").read_text()
        return int((SETTINGS / "hpage_pmd_size").read_text()) if allowed else 0
    except (OSError, ValueError):
        return 0


def in_huge_pages(array: mx.array) -> None:
    """Move an evaluated array's memory to huge pages where a CPU uses it and the system can; the bytes stay.

    Reading it then walks fewer page tables, which costs a virtual machine up to a third of its memory bandwidth, and a
    direct read into it is described in fewer pieces. Only whole huge pages within the array are moved.
    """
    global _patience
    size = huge_page_bytes() if device_kind() == "cpu" else 0
    if not size:
        return
    data = np.array(array.view(mx.uint8), copy=False)
    start = -(-data.ctypes.data // size) * size
    stop = (data.ctypes.data + data.nbytes) // size * size
    if stop <= start:
        return
    _patience += array.nbytes / BYTES_PER_SECOND
    # Linux collapses on request since 6.1; before, it may do so in time where it is advised to.
    refusal = _collapse(start, stop - start)
    if refusal and refusal not in PASSING:
        # A request ends at the first huge page that cannot be had, and one across two mappings never can.
        refusal = max(_collapse(page, size) for page in range(start, stop, size))
    if refusal:
        _advise(start, stop - start, MADV_HUGEPAGE)


def _collapse(address: int, length: int) -> int:
    """As `_advise`, asking on while refusals may pass and patience lasts."""
    global _patience
    refusal = _advise(address, length, MADV_COLLAPSE)
    while refusal in PASSING and _patience > 0:
        began = time.monotonic()
        refusal = _advise(address, length, MADV_COLLAPSE)
        _patience -= time.monotonic() - began
    return refusal


def _advise(address: int, length: int, advice: int) -> int:
    """0, or the system's reason (an errno) for refusing the advice."""
    refused = _libc().madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), advice)
    return ctypes.get_errno() if refused else 0


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
