"""This machine measured: disk by a store's own records, kernels by weights no cache holds, host by the demo model."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx

from . import kernels
from .api import demo_path, info, load
from .kernels import Weight
from .machine import Machine
from .session.llm import LLM
from .store import Store
from .streaming import disk_rates, machine_memory

ROWS, COLS, BYTES = 8192, 4096, 400e6
GROUP, BITS = 64, 4
STEPS = 40


def _packed() -> Weight:
    codes = mx.random.randint(0, 1 << 31, (ROWS, COLS * BITS // 32)).astype(mx.uint32)
    scales = mx.full((ROWS, COLS // GROUP), 0.01, mx.bfloat16)
    return Weight(codes, scales, mx.zeros_like(scales), BITS, GROUP, "affine")


def _plain() -> Weight:
    return Weight(mx.random.normal((ROWS, COLS)).astype(mx.bfloat16), None, None, 16, 0, "plain")


def _multiply_rate(make: Callable[[], Weight], x: mx.array) -> float:
    """GB/s of weights multiplied by one row after another, over more of them than caches hold."""
    first = make()
    weights = [first, *(make() for _ in range(int(BYTES // first.nbytes)))]
    for weight in weights:
        mx.eval(weight.arrays)
    spent = []
    for _ in range(4):
        began = time.perf_counter()
        for weight in weights:
            mx.eval(kernels.linear(x, weight, "decode"))
        spent.append(time.perf_counter() - began)
    return sum(weight.nbytes for weight in weights) / statistics.median(spent[1:]) / 1e9


def _multiplications(x: mx.array) -> float:
    """10^9 multiplications and additions a second of a prompt's block."""
    weight, spent = _packed(), []
    for _ in range(3):
        began = time.perf_counter()
        mx.eval(kernels.linear(x, weight, "prefill"))
        spent.append(time.perf_counter() - began)
    return 2 * x.shape[0] * ROWS * COLS / min(spent) / 1e9


@contextmanager
def _loaded(store: Path, memory: str | int, **options: Any) -> Iterator[LLM]:
    """A model on the backend that this process has forced, if any; a load by itself would change that for good."""
    kind = kernels.forced_kind()
    options |= {"backend": kind or "auto", "verify": "off", "progress": False, "replace": False}
    with kernels.forced(kind), load(store, memory, **options) as llm:
        yield llm


def _layer_us() -> float:
    """Microseconds of one streamed layer of the demo model, whose weights take next to no time."""
    with _loaded(demo_path(), "400MB", slots=22) as llm:
        response = llm.generate([1] * 8, max_tokens=STEPS, ignore_eos=True)
        return statistics.median(response.step_seconds) / len(llm.store.spec.layer_types) * 1e6


def _computing(store: Store) -> float:
    """Seconds of a decode step of `store` at the least budget that found every expert in memory; 0 without one."""
    least = info(store.path, follow_links=store.follow_links)["least_bytes"]
    found = []
    with _loaded(store.path, least, follow_links=store.follow_links) as llm:
        cache, token = llm.model.make_cache(), mx.array([[1]])
        for _ in range(STEPS):
            misses, began = llm.counters.misses, time.perf_counter()
            mx.eval(llm.model(token, cache=cache))
            if llm.counters.misses == misses:
                found.append(time.perf_counter() - began)
    return statistics.median(found) if found else 0.0


def probe(store: Store) -> Machine:
    """Measure this machine, as its forced backend runs, in some seconds: 0.5 GB of memory, then `store`'s least."""
    disk, page_cache, discarded = disk_rates(store)
    dtype = mx.float32 if kernels.device_kind() == "cpu" else mx.bfloat16
    row = mx.random.normal((1, COLS)).astype(dtype)
    return Machine(
        name="this machine",
        memory_bytes=machine_memory()[0],
        packed_gb_s=_multiply_rate(_packed, row),
        plain_gb_s=_multiply_rate(_plain, row),
        disk_gb_s=disk,
        page_cache_gb_s=page_cache,
        layer_us=_layer_us(),
        multiply_gops=_multiplications(mx.random.normal((kernels.BLOCK, COLS)).astype(dtype)),
        source="probed",
        discarded=discarded,
        computing=_computing(store),
    )
