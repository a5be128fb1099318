"""Progress of a long pass over bytes: how much, how fast, how long still."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

INTERVAL = 0.1


@dataclass(frozen=True)
class Progress:
    """Bytes done of total, bytes per second since the start, seconds left (None until known), and the file at hand."""

    done: int
    total: int
    rate: float
    eta: float | None
    file: str


class Meter:
    """Counts bytes and calls `report` at most ten times a second, and once at the end."""

    def __init__(self, report: Callable[[Progress], None] | None):
        self.report = report
        self.current = ""
        self.begin(0)

    def begin(self, total: int, already: int = 0) -> None:
        """Start counting towards `total` bytes, of which `already` were done before."""
        self.total, self.already, self.done = total, already, already
        self.started = time.monotonic()
        self.next = self.started

    def advance(self, nbytes: int) -> None:
        """Count `nbytes` more."""
        self.done += nbytes
        if self.total and self.report is not None and time.monotonic() >= self.next:
            self.next = time.monotonic() + INTERVAL
            self._tell()

    def finish(self) -> None:
        """Report the end."""
        self.done = self.total
        if self.report is not None:
            self._tell()

    def _tell(self) -> None:
        seconds = time.monotonic() - self.started
        rate = (self.done - self.already) / seconds if seconds > 0 else 0.0
        eta = (self.total - self.done) / rate if rate > 0 else None
        assert self.report is not None
        self.report(Progress(self.done, self.total, rate, eta, self.current))
