"""This library beside llama.cpp with mmap, the same shapes, both under one true memory limit and both cold.

    python -m benchmarks.capped [--json FILE] [--work DIR] [--layers 4 8] [--rounds 2] [--left SIZE]

A ballast locks all of the machine but SIZE: by default 0.68 of the peer's file, 1.65 GiB for 4 layers, and what an idle
process takes. Experts are wanted evenly in both models. For each prompt each program gets a process of its own and an
empty page cache; the time to the first token runs from loading the model, `loaded` from then on. Decoding follows the
prompt of 512. Needs root, 5 GB of disk for 4 layers and 9 for 8, in --work (kept for the next run; benchmarks.decode
uses the same files), and 3 and 6 minutes.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import command
from benchmarks.arms import Arm, Streamed, load_options
from benchmarks.ballast import ballast, drop_page_cache
from benchmarks.block import Block, cores, spread
from benchmarks.decode import files
from benchmarks.llama_cpp_peer import LlamaCpp
from mlx_ttd.streaming import parse_size

SHAPE, EXPERTS, LAYERS = "qwen3.6-35b-a3b", 256, (4, 8)
PROMPTS, STEPS, CONTEXT = (512, 2048), 32, 2560
SHARE, MARGIN = 0.68, 150_000_000
Found = dict[str, dict[str, list[float]]]


class Cold:
    """A program that loads its model when the first prompt comes."""

    def __init__(self, library: str, make: Callable[..., Any], *arguments: Any):
        importlib.import_module(library)
        self.make, self.arguments = make, arguments

    def first_token(self, count: int) -> tuple[float, float]:
        """Seconds of loading, and of a prompt of `count` tokens after that."""
        began = time.perf_counter()
        self.program = self.make(*self.arguments)
        return time.perf_counter() - began, self.program.prefill(count)

    def decode(self, count: int) -> float:
        """Seconds a token."""
        return statistics.fmean(self.program.decode(count))


def held(arm: Arm, figure: str) -> int:
    """Bytes of a process in memory, mapped files among them: now (VmRSS) or at most (VmHWM). Linux."""
    status = Path(f"/proc/{arm.process.pid}/status").read_text()
    return int(status.split(f"{figure}:", 1)[1].split()[0]) * 1024


def idle_bytes() -> int:
    """What a process takes before it loads a model, alike for both programs."""
    with Arm(Cold, "llama_cpp", LlamaCpp) as arm:
        return held(arm, "VmRSS")


def measure(store: Path, peer: Path, left: int, rounds: int, options: dict[str, Any], block: Block) -> Found:
    """Seconds and peak bytes by what was done and by program, one a round. `left` bytes are left to a program."""
    found: Found = {}
    idle = idle_bytes()
    memory = left - MARGIN
    programs = {
        "ours": ("mlx_ttd", Streamed, str(store), memory, CONTEXT, {"read_mode": "direct"} | options),
        "llama_cpp": ("llama_cpp", LlamaCpp, str(peer), cores(), CONTEXT, True),
    }
    with ballast(left + idle) as free:
        block.note(f"{store.name} limit", f"{free / 1e9:.2f} GB to be had, {idle / 1e9:.2f} an idle process, {memory=}")
        for _ in range(rounds):
            for prompt in PROMPTS:
                for name, made in programs.items():
                    drop_page_cache()
                    with Arm(Cold, *made) as arm:
                        loading, prefill = arm.ask("first_token", prompt)
                        values = {f"ttft_{prompt}": loading + prefill, f"ttft_{prompt}.loaded": prefill}
                        if prompt == PROMPTS[0]:
                            values["decode"] = arm.ask("decode", STEPS)
                        values[f"peak_{prompt}"] = held(arm, "VmHWM") - idle
                    for figure, value in values.items():
                        found.setdefault(figure, {}).setdefault(name, []).append(value)
    return found


def compare(block: Block, layers: int, found: Found) -> None:
    """The peer's over ours, at one number of layers; the result without one keeps the least of them."""
    for figure, programs in found.items():
        scale, unit = (1e-9, "GB") if figure.startswith("peak") else (1, "s")
        for name, values in programs.items():
            block.note(f"{figure} {layers} layers, {name}", f"{unit} {spread([v * scale for v in values])}")
        ours, theirs = (statistics.median(programs[name]) for name in ("ours", "llama_cpp"))
        first, _, rest = figure.partition(".")
        result = f"{first}_capped{'.' + rest if rest else ''}.vs_llama_cpp"
        block.results[f"{result}.{layers}_layers"] = theirs / ours
        block.results[result] = min(theirs / ours, block.results.get(result, theirs / ours))


def beside_the_store(store: Path, block: Block, rounds: int) -> None:
    """All of it, its files written beside `store`, as one of benchmarks.stream's measures."""
    run(store.parent, block, LAYERS, min(rounds, 2))


def run(
    work: Path, block: Block, layers: Sequence[int], rounds: int, left: int | None = None,
    experts: int = EXPERTS, **options: Any,
) -> None:  # fmt: skip
    for n in layers:
        store, peer = files(work, SHAPE, n, experts)
        compare(block, n, measure(store, peer, left or int(SHARE * peer.stat().st_size), rounds, options, block))
    block.note("cache", "dropped before each program")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", type=Path, help="directory for stores and files; left out: a temporary one")
    parser.add_argument("--layers", type=int, nargs="+", default=list(LAYERS))
    parser.add_argument("--experts", type=int, default=EXPERTS, help="fewer only to see that it runs")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--left", type=parse_size, metavar="SIZE")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="of mlx_ttd.load")
    arguments = parser.parse_args()
    options = load_options(arguments.option)
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        block = Block("capped", {"layers": arguments.layers, "rounds": arguments.rounds, **options}, work)
        run(work, block, arguments.layers, arguments.rounds, arguments.left, arguments.experts, **options)
        block.finish(arguments.json)


if __name__ == "__main__":
    command.run(main)
