"""How much memory another process holds."""

from __future__ import annotations

import ctypes
import resource
import sys
from contextlib import suppress
from pathlib import Path

RUSAGE_INFO_V0, FOOTPRINT = 0, 9


def resident_bytes(pid: int) -> int:
    """What process `pid` of this user holds in memory, compressed pages included; 0 when it is gone or unknown."""
    if sys.platform == "darwin":
        usage = (ctypes.c_uint64 * 12)()
        failed = ctypes.CDLL(None).proc_pid_rusage(pid, RUSAGE_INFO_V0, usage)
        return 0 if failed else usage[FOOTPRINT]
    with suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    return 0
