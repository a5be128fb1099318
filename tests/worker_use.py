"""How much time and memory the processes take that templates are rendered in."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from mlx_ttd.text import Limits, template_rendering
from mlx_ttd.text.process_memory import resident_bytes
from mlx_ttd.text.template_worker import Worker

AT_REST = 40 << 20
START_SECONDS = 1.0


def live() -> list[int]:
    """The ids of those that were started and not ended."""
    return [worker.pid for worker in template_rendering.processes.live]


def peak(pid: int) -> int:
    """Bytes at their most, where the system tells; else now."""
    with suppress(OSError, TypeError):
        return int(re.search(r"VmHWM:\s*(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) * 1024
    return resident_bytes(pid)


def processor_seconds(pid: int) -> float:
    """Unlike the clock's, they do not depend on what else the machine does; 0 where the system does not tell."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


@dataclass
class Use:
    """Of each process: bytes at their most, and seconds of the processor, those of its start included."""

    memory: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def check(self, limits: Limits) -> None:
        most, longest = max(self.memory, default=0), max(self.seconds, default=0)
        assert most < AT_REST + limits.memory, f"{most:,} bytes where templates are rendered"
        assert longest < START_SECONDS + limits.seconds, f"{longest:.1f} s where templates are rendered"


@contextmanager
def use_of_workers() -> Iterator[Use]:
    """What they use meanwhile; filled as each is ended, and in the end with those that live."""
    found, end, before = Use(), Worker.end, {pid: processor_seconds(pid) for pid in live()}

    def note(pid: int) -> None:
        found.memory.append(peak(pid))
        found.seconds.append(processor_seconds(pid) - before.get(pid, 0))

    def noted(worker: Worker) -> int:
        note(worker.pid)
        return end(worker)

    for pid in live():
        with suppress(OSError):
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins anew
    with mock.patch.object(Worker, "end", noted):
        yield found
    for pid in live():
        note(pid)
