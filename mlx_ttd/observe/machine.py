"""The state of the machine around a measurement: load, swap, page-outs, free disk and memory."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class MachineState:
    """load: runnable tasks over the last minute; page_outs: pages written to swap since start. Sizes in bytes."""

    load: float
    swap_bytes: int
    page_outs: int
    free_disk_bytes: int


def _linux() -> tuple[int, int]:
    info = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (int(info[key].split()[0]) * 1024 for key in ("SwapTotal", "SwapFree"))
    counts = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    return total - free, int(counts.get("pswpout", 0))


def _mac() -> tuple[int, int]:
    swap = subprocess.run(["/usr/sbin/sysctl", "-n", "vm.swapusage"], capture_output=True, text=True, check=True).stdout
    pages = subprocess.run(["/usr/bin/vm_stat"], capture_output=True, text=True, check=True).stdout
    used = re.search(r"used = ([0-9.]+)M", swap)
    outs = re.search(r"Swapouts:\s+([0-9]+)", pages)
    return int(float(used[1]) * 2**20) if used else 0, int(outs[1]) if outs else 0


def swap_and_page_outs() -> tuple[int, int]:
    """Bytes of swap in use, and pages written to it since the system started."""
    return _mac() if sys.platform == "darwin" else _linux()


def machine_state(folder: str | os.PathLike[str] = ".") -> MachineState:
    """The state now; the free disk is that of `folder`."""
    swap, page_outs = swap_and_page_outs()
    return MachineState(os.getloadavg()[0], swap, page_outs, shutil.disk_usage(folder).free)
