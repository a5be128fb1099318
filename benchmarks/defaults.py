"""The measured defaults of `mlx_ttd.load`, swept again: reads in flight and parts, eviction policy, prefill chunk.

    python -m benchmarks.defaults [--store DIR] [--layers 4] [--rounds 3] [--write]

Prints each value tried with its figure; --write puts the best into mlx_ttd/defaults.json, which options.py reads.
A value stays where those tried after it are hardly better. About 5 minutes and 4 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import command
from benchmarks.block import cores, processor
from benchmarks.live_arm import SHAPE, Choices, LiveArm, load, read_prompt, slots_of_whole_model
from benchmarks.synthetic_store import write_store
from mlx_ttd.observe import probing
from mlx_ttd.options import DEFAULTS_FILE
from mlx_ttd.streaming import policy_names
from mlx_ttd.streaming.replay import replay

DEPTHS, PARTS, CHUNKS = (8, 4, 16), (1, 2, 4), (2048, 1024, 512, 256)
TOKENS, PROMPT = 40, 2048
Rates = Mapping[Any, float]


def reads(store: Path, rounds: int) -> Rates:
    """GB/s by (depth, parts) while reads are in flight, decoding with the slots of 3 GB, read directly."""
    slots = slots_of_whole_model(3 * 10**9)
    found: dict[tuple[int, int], list[float]] = {key: [] for key in product(DEPTHS, PARTS)}
    with ExitStack() as open_models:
        arms = {d: LiveArm(open_models.enter_context(load(store, slots, depth=d)), warm=TOKENS) for d in DEPTHS}
        for _ in range(3 * rounds):
            for (depth, parts), rates in found.items():
                llm = arms[depth].llm
                assert llm.provider is not None
                llm.provider.pool.parts = parts
                before = llm.counters.copy()
                arms[depth].seconds(8)
                counts = llm.counters.since(before)
                rates.append(counts.bytes_read / counts.read_seconds / 1e9)
    return {key: statistics.median(rates) for key, rates in found.items()}


def policies(store: Path, rounds: int) -> Rates:
    """Hit rate by policy with the slots of 3 GB, on the store's own routing of random tokens."""
    slots, chosen = slots_of_whole_model(3 * 10**9), Choices()
    with load(store, slots, "cached") as llm, probing(chosen):
        LiveArm(llm, warm=TOKENS * rounds)
        experts = llm.store.spec.experts
    counts = {
        name: np.sum([replay(steps, experts, slots, name) for steps in chosen.steps.values()], axis=0)
        for name in sorted(policy_names())
    }
    return {name: float(hits / requests) for name, (hits, requests) in counts.items()}


def chunks(store: Path, rounds: int) -> Rates:
    """tok/s by prefill chunk of a prompt of PROMPT tokens from empty slots, read directly."""
    found: dict[int, list[float]] = {}
    for _ in range(rounds):
        for chunk in CHUNKS:
            with load(store, slots_of_whole_model(3 * 10**9), chunk=chunk) as llm:
                ids = np.random.default_rng(2).integers(0, llm.store.spec.vocab, PROMPT).tolist()
                found.setdefault(chunk, []).append(PROMPT / read_prompt(llm, ids, PROMPT))
    return {chunk: statistics.median(rates) for chunk, rates in found.items()}


def best(rates: Rates, worth: float) -> Any:
    """The first of the values in their order that no later one beats by more than the factor `worth`."""
    kept = next(iter(rates))
    for value, rate in rates.items():
        if rate > rates[kept] * worth:
            kept = value
    return kept


# A factor that runs differ by is not worth a change; and a smaller chunk reads every expert more often, which a slower
# disk pays for.
SWEEPS: dict[str, tuple[Callable[[Path, int], Rates], float, str]] = {
    "depth, parts": (reads, 1.03, "GB/s of direct reads while decoding with the slots of 3 GB"),
    "policy": (policies, 1.03, "hit rate with the slots of 3 GB"),
    "prefill_chunk": (chunks, 1.2, f"tok/s of a prompt of {PROMPT}"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="make the best values the defaults")
    arguments = parser.parse_args()
    defaults = json.loads(DEFAULTS_FILE.read_text())
    about = {"command": "python -m benchmarks.defaults --write", "date": date.today().isoformat()}
    about["machine"] = f"{processor()}, {cores()} cores"
    with tempfile.TemporaryDirectory() as folder:
        store = arguments.store or write_store(SHAPE, Path(folder) / "store", arguments.layers)
        for names, (sweep, worth, unit) in SWEEPS.items():
            rates = sweep(store, arguments.rounds)
            chosen = best(rates, worth)
            figure = f"{unit}: " + ", ".join(f"{value} {rate:.3g}" for value, rate in rates.items())
            print(f"{names} = {chosen}; {figure}", flush=True)
            values = chosen if isinstance(chosen, tuple) else (chosen,)
            for name, value in zip(names.split(", "), values, strict=True):
                # The largest chunk that fits is what 0 stands for.
                value = 0 if name == "prefill_chunk" and value == max(CHUNKS) else value
                defaults[name] = {"value": value, "figure": figure, **about}
    if arguments.write:
        lines = [f" {json.dumps(name)}: {json.dumps(entry)}" for name, entry in defaults.items()]
        DEFAULTS_FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    command.run(main)
