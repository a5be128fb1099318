"""How far loading or reading a prompt is, as one line that is rewritten, on a terminal or under a notebook's cell."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

DELAY, INTERVAL = 0.5, 0.1
CELLS = 24


def in_notebook() -> bool:
    """Whether this process is a Jupyter kernel."""
    python = sys.modules.get("IPython")
    return python is not None and hasattr(python.get_ipython(), "kernel")


def interactive() -> bool:
    """Whether this process is a Jupyter kernel or an IPython shell, where cells are run again."""
    python = sys.modules.get("IPython")
    return python is not None and python.get_ipython() is not None


class ProgressLine:
    """A line on standard error, where that is a terminal or a notebook's; nothing anywhere else.

    It appears when the work has gone on for half a second, and `clear` wipes it out.
    """

    def __init__(self, label: str, wanted: bool = True):
        self.label = label
        self.visible = wanted and (sys.stderr.isatty() or in_notebook())
        self._next = time.monotonic() + DELAY
        self._width = 0

    def show(self, text: str) -> None:
        """Replace what stands there by the label and `text`."""
        if self.visible and time.monotonic() >= self._next:
            self._next = time.monotonic() + INTERVAL
            self._write(f"{self.label}: {text}")

    def bar(self, show: Callable[[float], str] = "{:,}".format) -> Callable[[int, int], None]:
        """A function of (done, total) that draws a bar, the numbers written by `show`."""

        def draw(done: int, total: int) -> None:
            full = CELLS * done // max(1, total)
            self.show(f"{'█' * full}{'░' * (CELLS - full)} {show(done)} of {show(total)}")

        return draw

    def clear(self) -> None:
        """Wipe the line out."""
        if self._width:
            self._write("")

    def _write(self, line: str) -> None:
        end = "" if line else "\r"
        print(f"\r{line:<{self._width}}", end=end, file=sys.stderr, flush=True)
        self._width = len(line)
