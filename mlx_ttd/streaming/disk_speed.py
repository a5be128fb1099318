"""How fast a store's records, or a dense store's weights, come from disk and page cache, by a model's own reads."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..observe import Counters
from ..spec import STRIDE_UNIT
from ..store import Store
from .read_pool import Read, ReadPool, open_for_reading

RECORDS = 64
PIECE = 1 << 20
DEPTHS = (1, 2, 4, 8, 16)
CACHE_LIKE, WHOLE = 0.8, 0.9


def _aligned(count: int, stride: int) -> np.ndarray:
    raw = np.empty(count * stride + STRIDE_UNIT, np.uint8)
    start = -raw.ctypes.data % STRIDE_UNIT
    return raw[start : start + count * stride].reshape(count, stride)


def _records(store: Store, layer: int) -> tuple[Path, int, int, int]:
    """(file, offset of the first, bytes of one, number) of a layer's records; of pieces of the weights without any."""
    layout = store.layouts[layer]
    if layout is not None:
        path, start, experts = store.expert_file(layer)
        return path, start, layout.stride, experts
    path = next(iter(store.resident.values())).path
    held = path.stat().st_size
    size = min(PIECE, max(1, held // RECORDS // STRIDE_UNIT) * STRIDE_UNIT)
    return path, 0, size, held // size


def read_rate(
    store: Store, depth: int, parts: int = 1, direct: bool = True, batch: int = RECORDS, seed: int = 0, layer: int = 0
) -> float:
    """GB/s of reading RECORDS random records of a layer, `batch` of them asked for at a time. OSError where the file
    system has no direct reads."""
    path, start, size, count = _records(store, layer)
    chosen = np.random.default_rng(seed).permutation(count)[:RECORDS].tolist()
    into = _aligned(min(batch, len(chosen)), size)
    into[:] = 0
    pool = ReadPool(depth, parts, Counters())
    fd = open_for_reading(path, direct)
    try:
        began = time.perf_counter()
        for at in range(0, len(chosen), batch):
            places = [start + record * size for record in chosen[at : at + batch]]
            pool.submit([Read(fd, place, row.data) for place, row in zip(places, into, strict=False)]).wait()
        return len(chosen) * size / (time.perf_counter() - began) / 1e9
    finally:
        pool.close()
        os.close(fd)


def _device_bytes() -> int | None:
    """Bytes that devices have read for this process; None where the system does not tell."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_inblock * 512 if sys.platform == "linux" else None


def disk_rates(store: Store, depths: Sequence[int] = DEPTHS) -> tuple[dict[int, float], float, dict[str, str]]:
    """(GB/s of the disk by records asked for together, GB/s of the page cache at most together, discarded and why).

    A figure of direct reads stands only if the device answered: the system counts as many bytes read from devices, or,
    where it does not count, the same records come clearly faster from the page cache.
    """
    kept, discarded = {}, {}
    deepest = max(depths)
    _, _, size, count = _records(store, 0)
    for _ in range(2):
        cached = read_rate(store, deepest, direct=False)
    for seed, depth in enumerate(depths):
        before = _device_bytes()
        try:
            rate = read_rate(store, depth, batch=depth, seed=seed)
        except OSError as error:
            discarded[f"disk at depth {depth}"] = f"no direct reads here ({error.strerror})"
            continue
        after = _device_bytes()
        if before is not None and after is not None:
            share = (after - before) / (min(RECORDS, count) * size)
            reason = f"{rate:.2f} GB/s, but the device gave {share:.0%} of the bytes" if share < WHOLE else ""
        else:
            reason = f"{rate:.2f} GB/s, as fast as the page cache's {cached:.2f}" if rate > CACHE_LIKE * cached else ""
        if reason:
            discarded[f"disk at depth {depth}"] = reason
        else:
            kept[depth] = rate
    return kept, cached, discarded
