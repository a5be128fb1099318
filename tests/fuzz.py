"""Hostile input by the thousand: every reader of untrusted files either works or raises a TTDError, soon and in bounds.

    python tests/fuzz.py --target manifest --count 20000 [--start 0]

Input number i of a target is the same in every run; one that breaks a reader is written to the working directory.
"""

from __future__ import annotations

import argparse
import ctypes
import encodings.punycode  # noqa: F401  imported with the first host name
import random
import re
import resource
import signal
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
from fuzz_targets import TARGETS, Target
from worker_use import use_of_workers

from mlx_ttd.errors import TTDError

SECONDS, WAIT_SECONDS, TIMES, OWN_BYTES, MESSAGE_CHARACTERS = 1.0, 30, 10, 4 << 20, 4000
# By the clock, for a machine that has much else to do.
LONGEST_SECONDS = 60.0
FORBIDDEN = ("pickle.", "marshal.", "exec", "compile", "import", "os.", "subprocess.", "socket.", "ctypes.", "shutil.")
PROCESS = Path("/proc/self")
ALLOWED = ("os.listdir", "os.scandir", "os.walk", "os.fwalk")


watched: list[str] | None = None


def audit(event: str, arguments: tuple[Any, ...]) -> None:
    if watched is None:
        return
    if event == "open":
        mode, flags = arguments[1:]
        if (isinstance(mode, str) and set(mode) & set("wax+")) or (isinstance(flags, int) and flags & 3):
            watched.append(f"{event} {arguments!r}")
    elif event.startswith(FORBIDDEN) and event not in ALLOWED:
        watched.append(f"{event} {arguments!r}"[:300])


sys.addaudithook(audit)


@contextmanager
def watching() -> Iterator[list[str]]:
    """The forbidden events that Python's audit hooks report meanwhile."""
    global watched
    watched = found = []
    try:
        yield found
    finally:
        watched = None


def _waits(signal_number: int, frame: Any) -> None:
    raise AssertionError(f"it waited for {WAIT_SECONDS} s")


@contextmanager
def not_waiting() -> Iterator[None]:
    """AssertionError for what waits, as opening a FIFO does, and so spends no time of the processor."""
    before = signal.signal(signal.SIGALRM, _waits)
    signal.alarm(WAIT_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def warm(target: Target) -> None:
    """Read an intact and a broken file, so that what is imported or kept once is not charged to an input."""
    for data in (*target.seeds, b"{", b"{{ 1 / 0 }}", *target.seeds):
        target.place(data)
        with suppress(TTDError):
            target.read()


def resident_bytes(key: str = "VmRSS") -> int:
    """Memory of this process now (VmRSS) or at its peak (VmHWM)."""
    return int(re.search(rf"{key}:\s*(\d+)", (PROCESS / "status").read_text())[1]) * 1024


def allowed(target: Target, data: bytes) -> int:
    """Bytes that reading an input may take."""
    return TIMES * (len(data) + target.held) + OWN_BYTES


def check_soon(target: Target, data: bytes) -> bool:
    """As `check`, several times as fast: objects are counted only where the process grew by half of what is allowed.

    Memory that Python keeps after it was freed hides no more than earlier inputs took. Linux only.
    """
    ctypes.CDLL(None).malloc_trim(0)
    (PROCESS / "clear_refs").write_text("5")
    before = resident_bytes()
    taken = check(target, data, counted=False)
    grown = resident_bytes("VmHWM") - before
    return check(target, data) if grown > allowed(target, data) / 2 else taken


def check(target: Target, data: bytes, counted: bool = True) -> bool:
    """Whether the reader takes `data`. AssertionError, or any other exception but a TTDError, is a finding.

    counted: whether the bytes of Python's objects are.
    """
    target.place(data)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    arrays = mx.get_active_memory()
    mx.reset_peak_memory()
    if counted:
        tracemalloc.start()
    begun, started, message = time.monotonic(), time.process_time(), None
    try:
        with not_waiting(), use_of_workers() as use, watching() as events:
            target.read()
    except TTDError as error:
        message = str(error)
    finally:
        seconds, elapsed = time.process_time() - started, time.monotonic() - begun
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    if target.limits:
        events = [event for event in events if not event.startswith(("os.posix_spawn", "os.kill"))]
    if target.writes:
        events = [event for event in events if str(target.writes) not in event]
    limit = allowed(target, data)
    resident = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident) * 1024
    assert message is None or 20 < len(message) < MESSAGE_CHARACTERS, f"a message of {len(message):,} characters"
    if target.limits:
        use.check(target.limits)
    assert elapsed < LONGEST_SECONDS, f"{elapsed:.1f} s by the clock"
    assert not events, f"it did what no reader does: {events[:3]}"
    assert seconds < SECONDS, f"{seconds:.1f} s for {len(data):,} bytes"
    assert peak < limit, f"{peak:,} bytes of Python objects for {len(data):,} bytes"
    assert mx.get_peak_memory() - arrays < limit, f"{mx.get_peak_memory() - arrays:,} bytes of arrays"
    assert resident < limit + (32 << 20), f"memory grew by {resident:,} bytes for {len(data):,}"
    return message is None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=TARGETS, required=True)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--findings", type=int, default=5, help="how many to report before stopping")
    options = parser.parse_args()
    take = check_soon if (PROCESS / "clear_refs").exists() else check
    done, taken, findings, started = 0, 0, 0, time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        target = TARGETS[options.target](Path(scratch))
        warm(target)
        for number in range(options.start, options.start + options.count):
            try:
                data = target.make(random.Random(f"{options.target} {number}"), target.seeds)
                taken += take(target, data)
            except KeyboardInterrupt:
                break
            except BaseException as error:
                findings += 1
                saved = Path(f"{options.target}-{number}.input")
                saved.write_bytes(data)
                print(f"{saved}: {type(error).__name__}: {str(error)[:300]}", flush=True)
                if findings == options.findings:
                    break
            done += 1
    seconds = time.monotonic() - started
    print(f"{options.target}: {done:,} inputs in {seconds:.0f} s, {taken:,} taken, {findings} findings", flush=True)
    sys.exit(findings > 0)


if __name__ == "__main__":
    main()
