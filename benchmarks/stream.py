"""Streaming on a store of the real shapes: decode and prompts beside the disk's and the kernels' own bounds.

    python -m benchmarks.stream [--json FILE] [--store DIR] [--layers N] [--only NAME ...] [--rounds N]

Without --store one of --layers layers (8 by default) is written first, 6 GB. Banks have the slots that the named memory
buys for all 40 layers, so that a layer misses as often as in the whole model. Arms are alternated and the disk's own
speed is measured between them. Tokens are random; their routing is skewed as the store is. About 8 minutes without
`capped` (benchmarks.capped, which needs root), `peak`, `leak` and `plan`, which take up to 10, 5, 5 and 5 of their own;
4 layers are enough for `peak` and `leak`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

import mlx_ttd
from benchmarks import capped, command
from benchmarks.block import Block, spread
from benchmarks.live_arm import SHAPE, WARM, Choices, LiveArm, load, read_prompt, slots_of_whole_model
from benchmarks.peak_memory import over_budget
from benchmarks.synthetic_store import write_store
from mlx_ttd.observe import Profile, probing
from mlx_ttd.plan import forecast
from mlx_ttd.probe_machine import probe
from mlx_ttd.state import KVState
from mlx_ttd.store import open_store
from mlx_ttd.streaming import read_rate
from mlx_ttd.streaming.replay import replay

DEPTHS = (2, 4, 8, 16)
PROMPT, ALLOWANCE = 2048, 0.005
WARM_PLAN, STEPS_PLAN = 40, 12


def decode_direct(store: Path, block: Block, rounds: int) -> None:
    """Wall time of a token against reading what it missed plus what cannot overlap; the reads against plain ones."""
    opened, steps = open_store(store), 8
    with load(store, slots_of_whole_model(3 * 10**9)) as llm:
        arm = LiveArm(llm)
        ratios, shares, walls, bounds = [], [], [], []
        for index in range(rounds):
            before = llm.counters.copy()
            wall = statistics.fmean(arm.seconds(steps))
            counts = llm.counters.since(before)
            a_layer = max(1, round(counts.misses / steps / len(opened.layouts)))
            plain = max(read_rate(opened, depth, seed=index) for depth in DEPTHS)
            alike = max(read_rate(opened, 8, batch=a_layer, seed=index + i) for i in range(2))
            profile = Profile()
            with probing(profile):
                arm.seconds(3)
            phases = {name: spent / 3 for name, spent in profile.seconds.items()}
            overlapping = phases["shared"] + phases["expert_ffn"] * counts.hits / counts.requests
            other = sum(phases.values()) - phases["read"] - overlapping
            reading = counts.bytes_read / steps / plain / 1e9
            walls.append(wall)
            bounds.append(reading + other)
            ratios.append((wall - ALLOWANCE) / (reading + other))
            shares.append(counts.bytes_read / counts.read_seconds / 1e9 / alike)
        block.note("decode_direct", f"ms {spread([w * 1e3 for w in walls])}; bound {spread([b * 1e3 for b in bounds])}")
        block.note("decode_direct hits", f"{llm.stats().hit_rate:.0%} with {llm.division.slots} slots")
        block.note("read.fraction_of_disk", spread(shares))
        block.results["decode_direct.vs_bound"] = statistics.median(ratios)
        block.results["read.fraction_of_disk"] = statistics.median(shares)


def decode_warm(store: Path, block: Block, rounds: int) -> None:
    """12 slots a layer with every record in page cache, against every expert in memory."""
    experts = open_store(store).spec.experts
    with load(store, 12, "cached") as few, load(store, experts, "cached") as all_:
        arms = [LiveArm(few), LiveArm(all_)]
        prompt = np.random.default_rng(1).integers(0, few.store.spec.vocab, PROMPT).tolist()
        for arm in arms:
            read_prompt(arm.llm, prompt, PROMPT)
            arm.seconds(WARM)
        times = [[statistics.median(arm.seconds(8)) for arm in arms] for _ in range(rounds)]
        block.note("decode_warm", "ms " + ", ".join(spread([t[i] * 1e3 for t in times]) for i in (0, 1)))
        block.note("decode_warm resident misses", all_.counters.misses)
        block.results["decode_warm.vs_resident"] = statistics.median(b / a for a, b in times)


def prefetch(store: Path, block: Block, rounds: int) -> None:
    """The next layer's experts guessed and read ahead, always and for as long as it pays, against not at all."""
    slots, steps = slots_of_whole_model(3 * 10**9), 16
    with (
        load(store, slots) as off,
        load(store, slots, prefetch="next-layer") as always,
        load(store, slots, prefetch="next-layer") as trying,
    ):
        guessing: Any = always.provider
        guessing.next_layer.trial.due = lambda layer: True
        llms = {"off": off, "always": always, "trying": trying}
        arms = {name: LiveArm(llm) for name, llm in llms.items()}
        before = {name: llm.counters.copy() for name, llm in llms.items()}
        times = [{name: statistics.fmean(arm.seconds(steps)) for name, arm in arms.items()} for _ in range(rounds)]
        for name, llm in llms.items():
            counts, tokens = llm.counters.since(before[name]), rounds * steps
            block.note(
                f"prefetch {name}",
                f"ms {spread([t[name] * 1e3 for t in times])}; a token {counts.records / tokens:.1f} records read, "
                f"{counts.misses / tokens:.1f} missed, {counts.prefetched / tokens:.1f} guessed, "
                f"{counts.prefetch_used / tokens:.1f} of them right",
            )
        assert trying.provider is not None
        assert trying.provider.next_layer is not None
        still_on = trying.provider.next_layer.trial.on
        block.note("prefetch trying", "goes on" if still_on else "ended by itself")
        for name in ("always", "trying"):
            block.results[f"prefetch.{name}_vs_off"] = statistics.median(t["off"] / t[name] for t in times)


def prefill_2048(store: Path, block: Block, rounds: int) -> None:
    """A prompt of 2,048 from an empty bank, read directly: bytes against one pass, time against the bound."""
    opened = open_store(store)
    stride = next(layout.stride for layout in opened.layouts if layout is not None)
    ids = np.random.default_rng(2).integers(0, opened.spec.vocab, PROMPT).tolist()

    def run(llm: mlx_ttd.LLM) -> float:
        return read_prompt(llm, ids, PROMPT)

    few_slots = slots_of_whole_model(3 * 10**9)
    with load(store, few_slots, chunk=PROMPT) as few, load(store, opened.spec.experts, chunk=PROMPT) as all_:
        chosen = Choices()
        with probing(chosen):
            run(all_)
        pass_bytes, ratios, bounds = (
            sum(len(np.unique(np.concatenate(s))) for s in chosen.steps.values()) * stride,
            [],
            [],
        )
        for index in range(min(rounds, 3)):
            few.clear_experts()
            before = few.counters.copy()
            wall = run(few)
            ratios.append(few.counters.since(before).bytes_read / pass_bytes)
            reading = pass_bytes / max(read_rate(opened, depth, seed=index) for depth in DEPTHS) / 1e9
            computing = run(all_)
            bounds.append(wall / max(reading, computing))
            block.note(f"prefill_2048 round {index}", f"{wall:.2f} s; {reading:.2f} reading, {computing:.2f} computing")
        block.results["prefill_2048.bytes_ratio"] = max(ratios)
        block.results["prefill_2048.vs_bound"] = statistics.median(bounds)


def decode_32k(store: Path, block: Block, rounds: int) -> None:
    """Decoding at position 32,000, from a fabricated state, against 1,000; both with the slots of 4 GB."""
    with load(store, slots_of_whole_model(4 * 10**9, 32768), "cached", context=32768) as llm:
        arms = {}
        for position in (1000, 32000):
            arm = arms[position] = LiveArm(llm, warm=0)
            for layer in arm.sequence.state:
                if isinstance(layer, KVState):
                    for a in layer.arrays:
                        a[:] = mx.random.normal(a.shape).astype(a.dtype)
                    layer.offset = position
                    mx.eval(layer.state)
            arm.seconds(WARM)
        times = [[statistics.median(arms[p].seconds(8)) for p in (1000, 32000)] for _ in range(rounds)]
        block.note("decode_32k", "ms " + ", ".join(spread([t[i] * 1e3 for t in times]) for i in (0, 1)))
        block.results["decode_32k.vs_1k"] = statistics.median(a / b for a, b in times)


def peak(store: Path, block: Block, rounds: int) -> None:
    """100 random prompts, half of them at the least budget and half at twice it, each half in a fresh process."""
    least = mlx_ttd.info(store)["least_bytes"]
    found = [over_budget(store, times * least, 10 * rounds) for times in (1, 2)]
    block.note("peak", found)
    block.results["peak.over_budget_bytes"] = max(0, *(f["over"] for f in found))


def leak(store: Path, block: Block, rounds: int) -> None:
    """1,000 short prompts in one process: what each leaves behind, in its resident set and in live arrays."""
    found = over_budget(store, 2 * mlx_ttd.info(store)["least_bytes"], 200 * rounds, longest=8)
    block.note("leak", found)
    block.results["leak.bytes_a_generation"], block.results["leak.array_bytes_a_generation"] = (
        found["growth"],
        found["live"],
    )


def own_curve(store: Path, sizes: Sequence[int]) -> dict[float, float]:
    """Hit rate by slots a layer from the store's own routing of other random tokens, as warm as `plan_error` is."""
    chosen, curve = Choices(), {}
    with load(store, max(sizes), "cached") as llm, probing(chosen):
        LiveArm(llm, seed=3, warm=WARM_PLAN + STEPS_PLAN)
    for slots in sizes:
        counts = np.zeros(2)
        for steps in chosen.steps.values():
            counts += replay(steps, llm.store.spec.experts, slots, "lfu")
            counts -= replay(steps[:WARM_PLAN], llm.store.spec.experts, slots, "lfu")
        curve[float(slots)] = counts[0] / counts[1]
    return curve


def plan_error(store: Path, block: Block, rounds: int) -> None:
    """Ten budgets, read directly: forecasts from a probe of this machine against what was measured."""
    opened, errors = open_store(store), []
    machine, sizes = probe(opened), np.unique(np.geomspace(8, 128, 10).round().astype(int)).tolist()
    block.note("plan probe", machine)
    curve = own_curve(store, sizes)
    for slots in sizes:
        with load(store, slots) as llm:
            measured = 1 / statistics.fmean(LiveArm(llm, warm=WARM_PLAN).seconds(STEPS_PLAN))
            options = replace(llm.options, slots=slots)
            told = forecast(opened, options, machine, llm.division.total, 512, curve)
        errors.append(abs(told.tok_s / measured - 1))
        line = f"{slots * opened.expert_bytes / 1e9:.2f} GB: {told.tok_s:.2f} forecast, {measured:.2f} measured"
        block.note(f"plan {slots} slots", line)
    block.results["plan.worst_error"] = max(errors)
    block.results["plan.median_error"] = statistics.median(errors)


MEASURES: dict[str, Callable[[Path, Block, int], None]] = {
    "decode_direct": decode_direct,
    "decode_warm": decode_warm,
    "prefetch": prefetch,
    "prefill_2048": prefill_2048,
    "peak": peak,
    "leak": leak,
    "plan": plan_error,
    "decode_32k": decode_32k,
    "capped": capped.beside_the_store,
}


def measure(result: str) -> str:
    """The measure that gives a result such as "read.fraction_of_disk"."""
    first = result.split(".")[0]
    name = "decode_direct" if first == "read" else "capped" if first.endswith("_capped") else first
    if name not in MEASURES:
        raise argparse.ArgumentTypeError(f"{result} is not measured here; known are {', '.join(MEASURES)}.")
    return name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--only", nargs="+", type=measure, metavar="NAME", help="results, by name or its first part")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    rounds = arguments.rounds
    wanted = set(arguments.only or MEASURES)
    with tempfile.TemporaryDirectory() as folder:
        store = arguments.store or write_store(SHAPE, Path(folder) / "store", arguments.layers)
        layers = len(open_store(store).layouts)
        block = Block("stream", {"layers": layers, "rounds": rounds, "measures": sorted(wanted)}, store)
        block.note(
            "cache", "decode_direct, prefetch, prefill_2048 and plan read past the page cache; the others are warm"
        )
        for name in MEASURES:
            if name in wanted:
                MEASURES[name](store, block, rounds)
        block.finish(arguments.json)


if __name__ == "__main__":
    command.run(main)
