"""What verifying costs: a whole store against the disk and SHA-256, and records as a model reads them.

    python -m benchmarks.verification STORE [--rounds 5] [--json FILE]

Each round reads the store with one stream and with several, hashes on every core, and verifies, in turn and from an
empty page cache; then decodes under each `verify` of `load`, every arm in a model of its own. CPU seconds are given
beside wall time, since they hold on a busy machine. Minutes: three times the store's bytes over the disk's speed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import mlx_ttd
from benchmarks import command
from benchmarks.block import Block, cores, spread
from mlx_ttd.store import Store, open_store, verify
from mlx_ttd.store.file_ranges import block_buffer, drop_cached, opened, ranges

RANGE, HASHED, STREAMS = 16 << 20, 512 << 20, 4
CHECKS, SLOTS, TOKENS = ("off", "first-read", "always"), 24, 24
# On Linux ru_maxrss starts at the parent's; VmHWM does not.
PEAK = """
import re, resource, sys
import mlx_ttd.cli
def peak():
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1]) * 1024
before = peak()
mlx_ttd.verify(sys.argv[1])
print(peak() - before)
"""


def files_of(store: Store) -> list[Path]:
    return [store.path / name for name in store.manifest.files]


def empty_cache(store: Store) -> None:
    for path in files_of(store):
        with opened(path) as fd:
            drop_cached(fd, 0, path.stat().st_size)


own = threading.local()


def prepare() -> None:
    own.buffer = block_buffer(RANGE)


def read_range(place: tuple[Path, int, int]) -> None:
    for _ in ranges(*place, "a range", buffer=own.buffer):
        pass


def read_all(store: Store, streams: int) -> None:
    """Read every file as fast as the disk gives it: directly, into huge pages, 16 MB at a time."""
    sizes = [(path, path.stat().st_size) for path in files_of(store)]
    places = [(path, start, min(RANGE, size - start)) for path, size in sizes for start in range(0, size, RANGE)]
    with ThreadPoolExecutor(streams, initializer=prepare) as pool:
        list(pool.map(read_range, places))


def hash_all(nbytes: int) -> None:
    """Hash `nbytes` on every core, 4 MB at a time from memory."""
    data = os.urandom(4 << 20)
    with ThreadPoolExecutor(cores()) as pool:
        list(pool.map(lambda _: hashlib.sha256(data).digest(), range(nbytes // len(data))))


def seconds(action: Callable[[], object]) -> tuple[float, float]:
    """(wall, CPU) seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - wall, time.process_time() - cpu


def decode(store: Store, check: str, prompt: list[int]) -> tuple[float, float, int]:
    """(wall, CPU) milliseconds a token of a fresh model with few slots, and records read."""
    empty_cache(store)
    fixed: dict[str, Any] = {"slots": SLOTS, "context": 512, "progress": False}
    memory = mlx_ttd.info(store.path, **fixed)["least_bytes"] + 10**9
    with mlx_ttd.load(store.path, memory, verify=check, **fixed) as llm:
        llm.generate(prompt, max_tokens=1, ignore_eos=True)
        before = llm.stats().counters.records
        wall, cpu = seconds(lambda: llm.generate(prompt[:8], max_tokens=TOKENS, ignore_eos=True))
        return 1e3 * wall / TOKENS, 1e3 * cpu / TOKENS, llm.stats().counters.records - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    store = open_store(arguments.store)
    total = sum(path.stat().st_size for path in files_of(store))
    block = Block("verification", {"rounds": arguments.rounds, "store_bytes": total}, store.path)
    arms: dict[str, tuple[Callable[[], object], int]] = {
        "read_one_stream": (lambda: read_all(store, 1), total),
        "read_four_streams": (lambda: read_all(store, STREAMS), total),
        "sha256_all_cores": (lambda: hash_all(HASHED), HASHED),
        "verify": (lambda: verify(store.path), total),
    }
    rates: dict[str, list[float]] = {name: [] for name in arms}
    work: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(arguments.rounds):
        for name, (action, nbytes) in arms.items():
            empty_cache(store)
            wall, cpu = seconds(action)
            rates[name].append(nbytes / wall / 1e9)
            work[name].append(cpu / nbytes * 1e9)
    for name in arms:
        block.note(f"{name} GB/s", spread(rates[name]))
        block.note(f"{name} CPU s/GB", spread(work[name]))
        block.results |= {f"{name}_gb_s": statistics.median(rates[name])}
        block.results |= {f"{name}_cpu_s_per_gb": statistics.median(work[name])}
    one, sha, checked = (rates[name] for name in ("read_one_stream", "sha256_all_cores", "verify"))
    bounds = [c / min(r, s) for r, s, c in zip(one, sha, checked, strict=True)]
    block.note("of the lesser", spread(bounds))
    block.results["of_sequential_or_sha256"] = statistics.median(bounds)
    hashing = [s / c for s, c in zip(work["sha256_all_cores"], work["verify"], strict=True)]
    block.note("hashing's share", spread(hashing))
    block.results["sha256_share_of_cpu"] = statistics.median(hashing)
    peak = subprocess.run([sys.executable, "-c", PEAK, store.path], capture_output=True, text=True, check=True)
    block.results["peak_over_import_bytes"] = int(peak.stdout)
    prompt = np.random.default_rng(0).integers(0, store.spec.vocab, 16).tolist()
    found: dict[str, list[tuple[float, float, int]]] = {check: [] for check in CHECKS}
    for _ in range(arguments.rounds if store.spec.is_moe else 0):
        for check in CHECKS:
            found[check].append(decode(store, check, prompt))
    for check, rounds in found.items():
        for i, unit in enumerate(("ms", "cpu_ms")):
            values = [round_[i] for round_ in rounds]
            block.note(f"{check} {unit} a token", spread(values))
            block.results[f"decode_{check}_{unit}"] = statistics.median(values)
        block.results[f"decode_{check}_records"] = rounds[0][2]
    block.finish(arguments.json)


if __name__ == "__main__":
    command.run(main)
