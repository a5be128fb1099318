"""Reading ahead of a computation, computing on several workers, writing behind: all in order, few ranges in flight."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier
from typing import Any, TypeVar

import mlx.core as mx

DEPTH, MOST_WORKERS = 2, 4

S = TypeVar("S")
T = TypeVar("T")
_END: Any = object()


def ahead(items: Iterator[T], stop: Callable[[], None]) -> Iterator[T]:
    """Iterate over `items`, produced up to two ahead on a thread of their own; its exceptions surface here.

    `stop` is called when the iteration ends early, so that the item in the making is not waited for.
    """
    with ThreadPoolExecutor(1, "read-ahead") as pool:
        try:
            waiting = deque(pool.submit(next, items, _END) for _ in range(DEPTH))
            while (item := waiting.popleft().result()) is not _END:
                yield item
                waiting.append(pool.submit(next, items, _END))
        except BaseException:
            stop()
            raise


@contextmanager
def array_workers() -> Iterator[Executor]:
    """Threads for MLX operations: as many as CPUs, at most four; one where they run on a GPU."""
    count = 1 if mx.default_device() == mx.gpu else min(MOST_WORKERS, os.cpu_count() or 1)
    everyone = Barrier(count)

    def leave(_: int) -> None:
        everyone.wait()
        mx.clear_streams()

    with ThreadPoolExecutor(count, "quantise") as pool:
        try:
            yield pool
        finally:
            # A thread's MLX stream outlives the thread unless it is cleared there.
            list(pool.map(leave, range(count)))


def mapped(function: Callable[[S], T], items: Iterator[S], workers: Executor) -> Iterator[T]:
    """`function` of each item, in order, computed by the workers a few items ahead."""
    waiting: deque[Future[T]] = deque()
    for item in items:
        waiting.append(workers.submit(function, item))
        if len(waiting) > MOST_WORKERS:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


@contextmanager
def behind(action: Callable[..., None], most: int = 4 * DEPTH) -> Iterator[Callable[..., None]]:
    """A function that runs `action` later, in order, on one thread, at most so many calls behind.

    An error surfaces at one of the next calls, or at the end.
    """
    with ThreadPoolExecutor(1, action.__name__) as pool:
        waiting: deque[Future[None]] = deque()

        def submit(*arguments: Any) -> None:
            while waiting and (len(waiting) >= most or waiting[0].done()):
                waiting.popleft().result()
            waiting.append(pool.submit(action, *arguments))

        yield submit
        for future in waiting:
            future.result()
