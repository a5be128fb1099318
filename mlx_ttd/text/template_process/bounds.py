"""What the kernel holds this process to, while a template is rendered and at all times."""

from __future__ import annotations

import math
import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def settle() -> None:
    """Keep none of the program's files, folder or core dumps."""
    os.closerange(3, 1 << 20)
    os.chdir("/")
    set_soft(resource.RLIMIT_CORE, 0)


@contextmanager
def bounded(seconds: float, memory: int) -> Iterator[None]:
    """`memory` bytes of addresses more than now, where the kernel counts them; else the program watches.

    It watches the time as well; `seconds` of the processor, and two, end this process where the program is gone.
    """
    set_soft(resource.RLIMIT_CPU, math.ceil(time.process_time() + seconds) + 2)
    if sys.platform != "linux":
        yield
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    set_soft(resource.RLIMIT_AS, pages * resource.getpagesize() + memory)
    try:
        yield
    finally:
        set_soft(resource.RLIMIT_AS, resource.RLIM_INFINITY)


def set_soft(limit: int, value: int) -> None:
    """The soft limit, which never passes the hard one."""
    _, hard = resource.getrlimit(limit)
    known = [number for number in (value, hard) if number != resource.RLIM_INFINITY]
    resource.setrlimit(limit, (min(known, default=resource.RLIM_INFINITY), hard))
