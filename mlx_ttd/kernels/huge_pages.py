"""Huge pages under what a CPU reads over and over, on Linux."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np

from .backend import device_kind

SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25


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
    size = huge_page_bytes() if device_kind() == "cpu" else 0
    if not size or array.nbytes < size:
        return
    data = np.array(array.view(mx.uint8), copy=False)
    start = -(-data.ctypes.data // size) * size
    length = (data.ctypes.data + data.nbytes - start) // size * size
    if length <= 0:
        return
    # Linux collapses on request since 6.1; before, it may do so in time where it is advised to.
    madvise = ctypes.CDLL(None).madvise
    for advice in (MADV_COLLAPSE, MADV_HUGEPAGE):
        if madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), advice) == 0:
            return
