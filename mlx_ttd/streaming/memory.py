"""Memory sizes: what the user wrote, and what the machine has to give."""

from __future__ import annotations

import ctypes
import re
import sys
from contextlib import suppress
from pathlib import Path

from ..errors import OptionError
from ..spec import plain_number
from .control_group import control_group_memory

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
LEAST_ROOM, ROOM_SHARE = 300_000_000, 0.1
SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(size: int | float | str, name: str = "memory") -> int:
    """Bytes of '3GB' (10^9), '2.5GiB' (2^30) or a plain number. OptionError on anything else."""
    size = plain_number(size)
    match = SIZE.fullmatch(size) if isinstance(size, str) else None
    if match is not None and match[2].upper() in UNITS:
        unit = UNITS[match[2].upper()]
        value = float(match[1]) if unit == 1 else int(float(match[1]) * unit)
    elif isinstance(size, int | float) and not isinstance(size, bool):
        value = size
    else:
        raise OptionError(f"{name} {size!r} is not a size; write bytes, '3GB' (10^9), '2.5GiB' (2^30) or 'auto'.")
    if isinstance(value, float) and not value.is_integer():
        raise OptionError(f"{name} {size!r} is no whole number of bytes; write one, or '2.5GB' (10^9).")
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


def mac_reclaimable(vm_stat: str) -> int:
    """Bytes that a Mac can give without compressing or swapping: free pages, cached files and purgeable ones."""
    size = int(re.search(r"page size of (\d+)", vm_stat)[1])  # type: ignore[index]
    counts = {name: int(count) for name, count in re.findall(r"^(.+?):\s+(\d+)\.?$", vm_stat, re.MULTILINE)}
    return size * sum(counts.get(name, 0) for name in ("Pages free", "File-backed pages", "Pages purgeable"))


def _mac_memory() -> tuple[int, int]:
    import subprocess

    total = int(subprocess.run(["/usr/sbin/sysctl", "-n", "hw.memsize"], capture_output=True, check=True).stdout)
    pages = subprocess.run(["/usr/bin/vm_stat"], capture_output=True, check=True, text=True).stdout
    return total, mac_reclaimable(pages)


def machine_memory() -> tuple[int, int]:
    """(total, reclaimable) bytes of RAM, control groups respected; files in the page cache count as reclaimable."""
    if sys.platform == "darwin":
        return _mac_memory()
    info = _meminfo()
    total, available = info["MemTotal"], info["MemAvailable"]
    group = control_group_memory()
    return (total, available) if group is None else (min(total, group[0]), min(available, group[1]))


def give_back() -> None:
    """Hand memory that was freed, but that MLX or the C library keeps for later, back to the system."""
    import mlx.core as mx

    mx.clear_cache()
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def auto_budget(held: int = 0) -> int:
    """Half of RAM, at most what can be had with room left to others, and on Metal the recommended working set.

    held: bytes that the asker has already and may keep.
    """
    import mlx.core as mx

    total, reclaimable = machine_memory()
    reclaimable += held
    room = max(LEAST_ROOM, int(reclaimable * ROOM_SHARE))
    budget = min(total // 2, max(1, reclaimable - room))
    if mx.metal.is_available():
        budget = min(budget, int(mx.device_info()["max_recommended_working_set_size"]))
    return budget
