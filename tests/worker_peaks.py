"""How much memory the processes take that templates are rendered in."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from mlx_ttd.text import template_rendering
from mlx_ttd.text.process_memory import resident_bytes
from mlx_ttd.text.template_worker import Worker

AT_REST = 40 << 20


def live() -> list[int]:
    """The ids of those that were started and not ended."""
    return [worker.pid for worker in template_rendering.processes.live]


def peak(pid: int) -> int:
    """Bytes at their most, where the system tells; else now."""
    status = Path(f"/proc/{pid}/status")
    try:
        return int(re.search(r"VmHWM:\s*(\d+)", status.read_text())[1]) * 1024
    except (OSError, TypeError):
        return resident_bytes(pid)


@contextmanager
def peaks() -> Iterator[list[int]]:
    """The peak of each process that was ended meanwhile, and then of each that lives."""
    found, end = [], Worker.end

    def noted(worker: Worker) -> int:
        found.append(peak(worker.pid))
        return end(worker)

    with mock.patch.object(Worker, "end", noted):
        yield found
    found += map(peak, live())
