"""Converting a bf16 checkpoint of the real shapes, beside what disk and quantiser need for the same bytes alone.

    python -m benchmarks.conversion [--json FILE] [--layers 4] [--rounds 3] [--folder DIR] [--source DIR]

Each round, in turn: the conversion, in a process of its own, with the quantiser alone, from memory on all cores, before
and after it; the disk alone, which reads the checkpoint on one thread and writes a store's bytes on another as the
conversion does; SHA-256 of a store's bytes on one core. CPU seconds stand beside wall time, since they hold on a busy
machine. 14 GB of disk for 4 layers; a minute a round and one to write the checkpoint.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from hashlib import sha256
from pathlib import Path

import mlx.core as mx
import numpy as np

from benchmarks import command
from benchmarks.bf16_checkpoint import write_checkpoint
from benchmarks.block import Block, spread
from mlx_ttd.spec import Quantisation
from mlx_ttd.store import open_store
from mlx_ttd.store.encodings import Plain
from mlx_ttd.store.file_ranges import block_buffer, drop_cached, ranges
from mlx_ttd.store.pipeline import array_workers
from mlx_ttd.store.quantise import empty_parts, pack_into
from mlx_ttd.store.safetensors_file import make_header
from mlx_ttd.store.writer import FileWriter

SHAPE = "qwen3.6-35b-a3b"
SAMPLE, COLUMNS = 2 << 30, 2048
BLOCK_BYTES = 16 << 20
TIMED = ("disk", "quantise", "quantise_cpu", "sha256", "convert", "convert_cpu")
# On Linux ru_maxrss starts at the parent's; VmHWM does not.
CONVERT = """
import re, resource, sys, time
from mlx_ttd.store import convert
def peak():
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1]) * 1024
before, began = peak(), time.perf_counter()
convert(sys.argv[1], sys.argv[2])
print(time.perf_counter() - began, time.process_time(), peak() - before)
"""


def seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def cpu_seconds(action: Callable[[], object]) -> float:
    """Seconds that all threads of this process together were running."""
    began = time.process_time()
    action()
    return time.process_time() - began


def empty_cache(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    drop_cached(fd, 0, path.stat().st_size)
    os.close(fd)


def read(path: Path) -> None:
    for _ in ranges(path, 0, path.stat().st_size, "a checkpoint", buffer=block_buffer(BLOCK_BYTES)):
        pass


def write(path: Path, nbytes: int) -> None:
    """Write `nbytes` by the store's writer: in ranges, made durable as they come."""
    data = memoryview(np.random.default_rng(0).bytes(BLOCK_BYTES))
    with closing(FileWriter(make_header(path, {"bytes": ("U8", (nbytes,))}))) as writer:
        for start in range(0, nbytes, BLOCK_BYTES):
            writer.put("bytes", start, data[: min(BLOCK_BYTES, nbytes - start)])
        writer.flush()
    path.unlink()


def both_ways(source: Path, scratch: Path, nbytes: int) -> None:
    with ThreadPoolExecutor(2) as pool:
        for done in (pool.submit(read, source), pool.submit(write, scratch, nbytes)):
            done.result()


def quantise(values: int) -> None:
    """Pack `values` bf16 values to 4 bits by groups of 64 on the conversion's workers, from one block in memory."""
    rows = np.random.default_rng(0).standard_normal((BLOCK_BYTES // 4 // COLUMNS, COLUMNS), np.float32)
    block, packing = np.array(mx.array(rows).astype(mx.bfloat16).view(mx.uint16)).view(np.uint8), Quantisation(4, 64)

    def pack(_: int) -> None:
        pack_into([block], Plain("BF16"), packing, empty_parts(len(block), COLUMNS, packing))

    with array_workers() as workers:
        list(workers.map(pack, range(values // rows.size)))


def hash_all(nbytes: int) -> None:
    data = bytes(BLOCK_BYTES)
    for _ in range(nbytes // BLOCK_BYTES):
        sha256(data).digest()


def quantised_values(store: Path) -> int:
    """Values that a conversion packs to 4 bits, two a byte."""
    made = open_store(store)
    dense = [2 * info.nbytes for name, info in made.resident.items() if made.quantisation(name) is not None]
    experts = [m.rows * m.cols for layout in made.layouts if layout for m in (layout.gate_up, layout.down)]
    return sum(dense) + made.spec.experts * sum(experts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where 14 GB are written and removed; by default for temporaries")
    parser.add_argument("--source", type=Path, help="what benchmarks.bf16_checkpoint wrote; left out: it is written")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        root = Path(folder)
        block = Block("conversion", {"shape": SHAPE, "layers": arguments.layers, "rounds": arguments.rounds}, root)
        checkpoint = arguments.source or write_checkpoint(SHAPE, root / "source", arguments.layers)
        source = checkpoint / "model.safetensors"
        found: dict[str, list[float]] = {name: [] for name in (*TIMED, "peak")}
        written = values = 0
        for _ in range(arguments.rounds):
            store = root / "store"
            before = seconds(lambda: quantise(SAMPLE))
            empty_cache(source)
            done = subprocess.run(
                [sys.executable, "-c", CONVERT, source.parent, store], capture_output=True, text=True, check=True
            )
            packing = before + seconds(lambda: quantise(SAMPLE))
            wall, work, peak = done.stdout.split()
            written, values = sum(f.stat().st_size for f in store.rglob("*")), quantised_values(store)
            shutil.rmtree(store)
            empty_cache(source)
            found["disk"].append(seconds(partial(both_ways, source, root / "scratch", written)))
            found["quantise"].append(packing * values / (2 * SAMPLE))
            found["sha256"].append(seconds(partial(hash_all, written)))
            found["convert"].append(float(wall))
            found["convert_cpu"].append(float(work))
            found["quantise_cpu"].append(cpu_seconds(lambda: quantise(SAMPLE)) * values / SAMPLE)
            found["peak"].append(float(peak))
        size = source.stat().st_size
        block.note("bytes", f"{size:,} read, {written:,} written, {values:,} values packed")
        for name in TIMED:
            block.note(f"{name} s", spread(found[name]))
            block.results[f"conversion.{name}_seconds"] = statistics.median(found[name])
        rounds = zip(found["disk"], found["quantise"], found["convert"], strict=True)
        shares = [max(disk, packing) / whole for disk, packing, whole in rounds]
        block.note("of the slower", spread(shares))
        block.results["conversion.fraction_of_slower"] = statistics.median(shares)
        block.results["conversion.peak_bytes"] = max(found["peak"])
        block.finish(arguments.json)


if __name__ == "__main__":
    command.run(main)
