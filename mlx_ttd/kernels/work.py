"""What operations cost besides time, counted for whoever asked on the same thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx


class Work(Protocol):
    """launches: of GPU texts. weight_bytes_copied: of weights that were converted for a product, or sent to a GPU."""

    launches: int
    weight_bytes_copied: int


@dataclass
class _Counts:
    launches: int = 0
    weight_bytes_copied: int = 0


class _Mine(threading.local):
    work: Work | None = None


_mine = _Mine()


@contextmanager
def counting(work: Work) -> Iterator[None]:
    """Add to `work` what this thread's operations do in the block; a block within the block counts in its stead."""
    before, _mine.work = _mine.work, work
    try:
        yield
    finally:
        _mine.work = before


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """mx.compile of `function`, whose work counts each time that the graph runs."""
    once = _Counts()

    def trace(*arrays: mx.array) -> Any:
        once.launches = once.weight_bytes_copied = 0
        with counting(once):
            return function(*arrays)

    graph = mx.compile(trace)

    def run(*arrays: mx.array) -> Any:
        made = graph(*arrays)
        if _mine.work is not None:
            _mine.work.launches += once.launches
            _mine.work.weight_bytes_copied += once.weight_bytes_copied
        return made

    return run


def launched() -> None:
    """Count a launch."""
    if _mine.work is not None:
        _mine.work.launches += 1


def as_dtype(weight: mx.array, dtype: mx.Dtype) -> mx.array:
    """Numbers of a weight as another type, a copy that is counted; the array itself where they are of that type."""
    if weight.dtype == dtype:
        return weight
    sent(weight)
    return weight.astype(dtype)


def sent(weight: mx.array) -> None:
    """Count a weight that was copied."""
    if _mine.work is not None:
        _mine.work.weight_bytes_copied += weight.nbytes
