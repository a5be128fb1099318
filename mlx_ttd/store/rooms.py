"""Memory for large reads and what is made of them, used again as soon as nobody holds it."""

from __future__ import annotations

import weakref
from collections import defaultdict

import numpy as np

from .file_ranges import block_buffer


class Rooms:
    """Arrays at a page, in huge pages where there are any, whose memory comes back when the last view of them goes.

    Memory from the system would be cleared and mapped anew for each read.
    """

    def __init__(self) -> None:
        self._free: defaultdict[int, list[memoryview]] = defaultdict(list)

    def take(self, nbytes: int) -> np.ndarray:
        """uint8 [nbytes] of any content, at a page and with the rest of its last page behind it."""
        size = 1 << (nbytes - 1).bit_length()
        free = self._free[size]
        try:
            memory = free.pop()
        except IndexError:
            memory = block_buffer(size)
        whole = np.frombuffer(memory, np.uint8)
        weakref.finalize(whole, free.append, memory).atexit = False
        return whole[:nbytes]
