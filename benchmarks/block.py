"""The block that every benchmark prints, and the JSON it writes.

`Block(name, effective)` before measuring notes the state of the machine; figures go into `results`, lines that are no
figures (cache state, floors, digests) through `note`; `finish(path)` prints and writes {"machine", "results", ...}.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import mlx.core as mx

from benchmarks.commits import commit
from mlx_ttd._version import __version__
from mlx_ttd.observe import MachineState, machine_state
from mlx_ttd.streaming.memory import machine_memory

LIBRARIES = ("mlx", "numpy", "mlx-lm", "llama-cpp-python")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def processor() -> str:
    """The processor's name as its maker gives it."""
    if sys.platform == "darwin":
        command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> dict[str, Any]:
    """What the figures are taken on, and with which versions."""
    on_gpu = mx.default_device().type != mx.DeviceType.cpu
    return {
        "processor": processor(),
        "cores": cores(),
        "memory_bytes": machine_memory()[0],
        "gpu": str(mx.device_info().get("device_name", "unknown")) if on_gpu else None,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "mlx_ttd": __version__,
        **{name: found for name in LIBRARIES if (found := _version(name))},
    }


def spread(values: Sequence[float]) -> str:
    """Median with smallest and largest, as the block shows repeated measurements."""
    return f"{statistics.median(values):.4g} ({min(values):.4g} to {max(values):.4g}, {len(values)} rounds)"


def show_state(state: MachineState) -> str:
    disk, swap = state.free_disk_bytes / 1e9, state.swap_bytes / 1e9
    return f"load {state.load:.2f}, swap {swap:.2f} GB, {state.page_outs:,} page-outs, {disk:.1f} GB disk free"


class Block:
    """One run of a benchmark. `effective` is its configuration; `results` maps names to numbers."""

    def __init__(self, benchmark: str, effective: Mapping[str, Any], folder: str | os.PathLike[str] = "."):
        self.benchmark, self.effective, self.folder = benchmark, dict(effective), folder
        self.machine, self.before = machine(), machine_state(folder)
        self.results: dict[str, float] = {}
        self.notes: list[tuple[str, str]] = []

    def noisy(self, after: MachineState) -> bool:
        """Whether others kept every core busy before, or the machine swapped meanwhile."""
        return self.before.load > cores() or after.page_outs > self.before.page_outs

    def note(self, name: str, text: object) -> None:
        """A line of the block that is no result: cache state, phases, digests, floors."""
        self.notes.append((name, str(text)))

    def text(self, after: MachineState) -> str:
        """The pasteable block."""
        machine = ", ".join(f"{name} {value}" for name, value in self.machine.items() if value is not None)
        rows = [("machine", machine), ("commit", commit() or "unknown"), ("before", show_state(self.before))]
        rows += [("after", show_state(after)), ("options", json.dumps(self.effective)), *self.notes]
        if self.noisy(after):
            rows.append(("noisy", "the machine was busy or swapped; ratios hold better than absolute figures"))
        lines = [f"{name + ':':<11} {value}" for name, value in rows]
        lines += [f"  {name:<40}{value:>14.4f}" for name, value in self.results.items()]
        return "\n".join([f"```\nbenchmarks.{self.benchmark}, {date.today().isoformat()}", *lines, "```"])

    def finish(self, path: Path | None = None) -> None:
        """Print the block; write `path`."""
        after = machine_state(self.folder)
        print(self.text(after), flush=True)
        if path is not None:
            entry = {"machine": self.machine, "noisy": self.noisy(after), "results": self.results, "commit": commit()}
            state = {"before": asdict(self.before), "after": asdict(after)}
            extra = {"effective": self.effective, "notes": dict(self.notes)}
            path.write_text(json.dumps(entry | state | extra, indent=1) + "\n")
