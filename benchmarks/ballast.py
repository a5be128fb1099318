"""A memory limit that nothing gets round: a process locks all of the machine's memory but a stated amount.

    python -m benchmarks.ballast LEFT       in bytes or as "1.65GiB"; holds it until standard input ends (Linux, root)

The process is the first to be killed when memory runs out. 21 GiB take 30 s.
"""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlx_ttd.streaming import parse_size
from mlx_ttd.streaming.memory import machine_memory

PIECE = 1 << 28


def drop_page_cache() -> None:
    """Drop every clean page of the system's page cache (Linux, root)."""
    subprocess.run(["sync"], check=True)
    Path("/proc/sys/vm/drop_caches").write_text("3\n")


def lock_all_but(left: int) -> list[mmap.mmap]:
    """Lock memory until `left` bytes can still be had. OSError where the system forbids it."""
    library, held = ctypes.CDLL(None, use_errno=True), []
    while (more := machine_memory()[1] - left) >= mmap.PAGESIZE:
        piece = mmap.mmap(-1, min(PIECE, more // mmap.PAGESIZE * mmap.PAGESIZE))
        address = ctypes.addressof(ctypes.c_char.from_buffer(piece))
        if library.mlock(ctypes.c_void_p(address), ctypes.c_size_t(len(piece))):
            raise OSError(ctypes.get_errno(), "mlock failed; run as root or raise `ulimit -l`")
        held.append(piece)
    return held


@contextmanager
def ballast(leave_bytes: int) -> Iterator[int]:
    """Leave the rest of the machine `leave_bytes` in the block; gives the bytes that could be had when it began.

    RuntimeError if the memory cannot be locked, or if the ballast died before the block ended.
    """
    command = [sys.executable, "-m", "benchmarks.ballast", str(leave_bytes)]
    root = Path(__file__).parent.parent
    with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        answer = process.stdout.readline()
        if not answer:
            raise RuntimeError(f"memory could not be locked down to {leave_bytes:,} bytes.")
        yield int(answer)
        if process.poll() is not None:
            raise RuntimeError("the ballast was killed, so there was no memory limit; leave more.")


def main() -> None:
    Path("/proc/self/oom_score_adj").write_text("1000")
    drop_page_cache()
    held = lock_all_but(parse_size(sys.argv[1]))
    print(machine_memory()[1], flush=True)
    sys.stdin.read()
    del held


if __name__ == "__main__":
    main()
