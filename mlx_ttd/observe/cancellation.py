"""Where a long computation may be given up: between blocks, between waves of experts, while it waits for reads."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Cancelled(Exception):
    """Raised at a cancel point of a computation that nobody waits for any more."""


class _Mine(threading.local):
    check: Callable[[], None] | None = None


_mine = _Mine()


def cancel_point() -> None:
    """Raise Cancelled where whoever runs this thread's computations wants this one to end."""
    if _mine.check is not None:
        _mine.check()


def check_at_cancel_points(check: Callable[[], None]) -> None:
    """Call `check`, which may raise Cancelled, at every cancel point that this thread comes to."""
    _mine.check = check
