"""Reading ahead of a computation and writing behind it, each on one thread, with few ranges in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

DEPTH = 2

T = TypeVar("T")
_END: Any = object()


def ahead(items: Iterator[T]) -> Iterator[T]:
    """Iterate over `items`, produced up to two ahead on a thread of their own; its exceptions surface here."""
    with ThreadPoolExecutor(1, "read-ahead") as pool:
        waiting = deque(pool.submit(next, items, _END) for _ in range(DEPTH))
        while (item := waiting.popleft().result()) is not _END:
            yield item
            waiting.append(pool.submit(next, items, _END))


@contextmanager
def behind(action: Callable[..., None]) -> Iterator[Callable[..., None]]:
    """A function that runs `action` later, in order, on one thread, few calls behind; errors surface by the end."""
    with ThreadPoolExecutor(1, "write-behind") as pool:
        waiting: deque[Future[None]] = deque()

        def submit(*arguments: Any) -> None:
            while len(waiting) >= 4 * DEPTH:
                waiting.popleft().result()
            waiting.append(pool.submit(action, *arguments))

        yield submit
        for future in waiting:
            future.result()
