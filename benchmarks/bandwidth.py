"""How fast the processor reads memory: the floor beside every figure of a kernel that reads weights once."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from benchmarks.block import cores


def read_bandwidth(seconds: float = 1.0) -> float:
    """GB/s at which all cores together read 512 MB, best of what fits in `seconds`."""
    parts = [np.ones(512_000_000 // cores() // 4, np.uint32) for _ in range(cores())]
    best, end = 0.0, time.perf_counter() + seconds
    with ThreadPoolExecutor(cores()) as pool:
        while time.perf_counter() < end:
            began = time.perf_counter()
            list(pool.map(np.max, parts))
            best = max(best, sum(p.nbytes for p in parts) / (time.perf_counter() - began) / 1e9)
    return best
