"""More memory until the machine swaps: decoding speed by budget on a machine made small, and where "auto" lands.

    python -m benchmarks.auto_memory STORE [--left 3GB] [--budgets N] [--rounds N] [--tokens N] [--ungoverned]
                                     [--swap 4GB] [--option NAME=VALUE] [--json FILE]

A ballast locks all of the machine but `--left`, by default the store's least budget, a third of its experts and 500 MB;
a swap file lies beside the store meanwhile. Budgets go in even steps from the least to a third more than is left. Every
run has a process of its own, takes one prompt to fill its banks and is measured on the next. `--ungoverned` keeps the
library from giving slots back, so that the whole fall is seen. Needs root on Linux, and about a minute a run of a store
of 8 layers.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx_ttd
from benchmarks import command
from benchmarks.arms import Arm, load_options
from benchmarks.ballast import ballast, drop_page_cache
from benchmarks.block import Block, spread
from benchmarks.budgets import Budget
from mlx_ttd.errors import PressureError
from mlx_ttd.streaming import parse_size, show_size

WARM, ROOM, BEYOND = 32, 500_000_000, 4 / 3


@contextmanager
def swap_file(path: Path, size: int) -> Iterator[None]:
    """Let the system swap to a file of `size` bytes in the block; 0 for none."""
    if not size:
        yield
        return
    with path.open("wb") as file:
        path.chmod(0o600)
        os.posix_fallocate(file.fileno(), 0, size)
    try:
        subprocess.run(["mkswap", str(path)], check=True, stdout=subprocess.DEVNULL)
        subprocess.run(["swapon", str(path)], check=True)
        try:
            yield
        finally:
            subprocess.run(["swapoff", str(path)], check=True)
    finally:
        path.unlink()


class Tight(Budget):
    """A budget on a machine that may be short of memory."""

    def __init__(self, store: str, memory: str, governed: bool, options: dict[str, Any]):
        super().__init__(store, memory, "cpu", options)
        if not governed:
            self.llm._core.governor.check = lambda: None  # type: ignore[method-assign]
            if self.llm.provider is not None:
                self.llm.provider.before_call = None

    def speed(self, seed: int, tokens: int) -> dict[str, float]:
        """Tokens a second after a prompt that filled the banks, 0 if the run was stopped; and what it took."""
        stopped, found = False, {"tok_s": 0.0, "hit_rate": 0.0}
        shrinks = 0
        try:
            self.generate(0, WARM)
            shrinks = self.llm.stats().counters.shrinks
            found = self.generate(seed, tokens)
        except PressureError:
            stopped = True
        counts, division = self.llm.stats().counters, self.llm.division
        return {
            "tok_s": found["tok_s"],
            "hit_rate": found["hit_rate"],
            "shrinks": shrinks + counts.shrinks,
            "stopped": stopped,
            "budget": division.total,
            "slots": division.slots,
        }


def measure(
    store: Path, memory: str, governed: bool, seed: int, tokens: int, options: dict[str, Any]
) -> dict[str, float]:
    drop_page_cache()
    with Arm(Tight, str(store), memory, governed, options) as arm:
        return arm.ask("speed", seed, tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--left", type=parse_size, metavar="SIZE")
    parser.add_argument("--swap", type=parse_size, metavar="SIZE", default=parse_size("4GB"))
    parser.add_argument("--budgets", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--ungoverned", action="store_true")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="of mlx_ttd.load")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    options = load_options(arguments.option)
    about = mlx_ttd.info(arguments.store, **options)
    least = about["least_bytes"]
    most = mlx_ttd.info(arguments.store, **options | {"slots": about["experts"]})["least_bytes"]
    left = arguments.left or least + (most - least) // 3 + ROOM
    end = min(int(left * BEYOND), most)
    steps = [least + i * (end - least) // (arguments.budgets - 1) for i in range(arguments.budgets)]
    names = [*(str(step) for step in steps), "auto"]
    effective = {"left": left, "swap": arguments.swap, "governed": not arguments.ungoverned, **options}
    block = Block("auto_memory", effective, arguments.store)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with swap_file(arguments.store.parent / "swap", arguments.swap), ballast(left) as free:
        block.note("limit", f"{show_size(free)} could be had with the ballast in place")
        for seed in range(1, arguments.rounds + 1):
            for name in names:
                governed = not arguments.ungoverned
                found[name].append(measure(arguments.store, name, governed, seed, arguments.tokens, options))
    speeds = {name: statistics.median(run["tok_s"] for run in runs) for name, runs in found.items()}
    for name, runs in found.items():
        budgets = sorted({show_size(run["budget"]) for run in runs})
        tail = (
            f"{runs[-1]['slots']:.0f} slots a layer, {runs[-1]['hit_rate']:.0%} hits, {runs[-1]['shrinks']:.0f} shrinks"
        )
        ended = f", {sum(run['stopped'] for run in runs):.0f} stopped" if any(run["stopped"] for run in runs) else ""
        label = f"{'auto: ' if name == 'auto' else ''}{' to '.join(budgets)}"
        block.note(label, f"tok/s {spread([run['tok_s'] for run in runs])}; {tail}{ended}")
    fixed = [speeds[str(step)] for step in steps]
    best = max(range(len(steps)), key=fixed.__getitem__)
    block.results["best.budget_bytes"] = steps[best]
    block.results["auto.budget_bytes"] = statistics.median(run["budget"] for run in found["auto"])
    block.results["auto.vs_best"] = speeds["auto"] / max(fixed)
    block.results["largest.vs_best"] = fixed[-1] / max(fixed)
    block.results["interior_optimum"] = float(0 < best < len(steps) - 1)
    block.note("cache", "dropped before each run; files " + str(options.get("read_mode", "cached")))
    block.finish(arguments.json)


if __name__ == "__main__":
    command.run(main)
