"""What only the first use of a kernel costs: compiling a GPU's text, loading the native part. Kept a process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_seconds: dict[str, float] = {}
_listener: Callable[[str], None] | None = None


def compile_seconds() -> float | None:
    """Seconds that first uses took in this process so far; None before there was one."""
    return sum(_seconds.values()) if _seconds else None


def working_clock() -> float:
    """time.perf_counter, less what first uses took."""
    return time.perf_counter() - sum(_seconds.values())


@contextmanager
def first_use(name: str) -> Iterator[None]:
    """Time the first use of `name`, whose inputs have been evaluated and whose outputs the block waits for."""
    if _listener is not None:
        _listener(name)
    started = time.perf_counter()
    yield
    _seconds[name] = _seconds.get(name, 0.0) + time.perf_counter() - started


@contextmanager
def announcing(listener: Callable[[str], None]) -> Iterator[None]:
    """Call `listener` with the name of every kernel that is first used in the block, before it is."""
    global _listener
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before
