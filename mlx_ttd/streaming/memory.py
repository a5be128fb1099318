"""Memory sizes: what the user wrote, and what the machine has to give."""

from __future__ import annotations

import ctypes
import re
import sys
from contextlib import suppress
from pathlib import Path

from ..errors import OptionError

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(size: int | float | str, name: str = "memory") -> int:
    """Bytes of '3GB' (10^9), '2.5GiB' (2^30) or a plain number. OptionError on anything else."""
    match = SIZE.fullmatch(size) if isinstance(size, str) else None
    if match is not None and match[2].upper() in UNITS:
        value = float(match[1]) * UNITS[match[2].upper()]
    elif isinstance(size, int | float) and not isinstance(size, bool):
        value = size
    else:
        raise OptionError(f"{name} {size!r} is not a size; write bytes, '3GB' (10^9), '2.5GiB' (2^30) or 'auto'.")
    if not 0 < value < 2**50:
        raise OptionError(f"{name} {size!r} is out of range; it must be above 0 and below 1 PiB.")
    return int(value)


def show_size(size: float) -> str:
    """'2.71 GB' for a person."""
    for unit in ("GB", "MB", "KB"):
        if size >= UNITS[unit]:
            return f"{size / UNITS[unit]:.2f} {unit}"
    return f"{int(size)} B"


def _meminfo() -> dict[str, int]:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return {key: int(rest.split()[0]) * 1024 for key, rest in (line.split(":", 1) for line in lines)}


def _cgroup_headroom() -> int | None:
    """Bytes left under the memory limit of this process's control group, None without one."""
    root = Path("/sys/fs/cgroup")
    try:
        own = Path("/proc/self/cgroup").read_text().split("::", 1)[1].split("\n", 1)[0].lstrip("/")
    except (OSError, IndexError):
        return None
    left: list[int] = []
    for folder in (root / own, *(root / own).parents):
        try:
            limit = (folder / "memory.max").read_text().strip()
            if limit != "max":
                left.append(int(limit) - int((folder / "memory.current").read_text()))
        except (OSError, ValueError):
            pass
        if folder == root:
            break
    return min(left) if left else None


def _mac_memory() -> tuple[int, int]:
    import subprocess

    total = int(subprocess.run(["/usr/sbin/sysctl", "-n", "hw.memsize"], capture_output=True, check=True).stdout)
    pages = subprocess.run(["/usr/bin/vm_stat"], capture_output=True, check=True, text=True).stdout
    size = int(re.search(r"page size of (\d+)", pages)[1])  # type: ignore[index]
    reclaimable = sum(
        int(count)
        for name, count in re.findall(r"Pages ([a-z ]+):\s+(\d+)", pages)
        if name in ("free", "inactive", "speculative", "purgeable")
    )
    return total, reclaimable * size


def machine_memory() -> tuple[int, int]:
    """(total, reclaimable) bytes of RAM, control groups respected."""
    if sys.platform == "darwin":
        return _mac_memory()
    info = _meminfo()
    total, available = info["MemTotal"], info["MemAvailable"]
    headroom = _cgroup_headroom()
    return total, available if headroom is None else max(0, min(available, headroom))


def give_back() -> None:
    """Hand memory that was freed, but that MLX or the C library keeps for later, back to the system."""
    import mlx.core as mx

    mx.clear_cache()
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def auto_budget() -> int:
    """Half of RAM, at most what can be had without pushing others out, and on Metal the recommended working set."""
    import mlx.core as mx

    total, reclaimable = machine_memory()
    budget = min(total // 2, int(reclaimable * 0.9))
    if mx.metal.is_available():
        budget = min(budget, int(mx.device_info()["max_recommended_working_set_size"]))
    return budget
