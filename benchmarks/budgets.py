"""One store under several memory budgets: the same tokens, at what speed, hit rate and peak memory.

    python -m benchmarks.budgets STORE [--memory 3GB 6GB ...] [--tokens N] [--device gpu] [--json FILE]

Every budget has a process of its own; they take the same prompts in turn, tokens sampled with the prompt's number as
seed. The first prompt finds an empty bank and is told apart. Records come through the page cache unless
`--option read_mode=direct`. 64 tokens of a 40-layer store take some 20 seconds a round and budget.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

import mlx_ttd
from benchmarks import command
from benchmarks.arms import Arm, load_options
from benchmarks.block import Block, spread
from mlx_ttd.generation.response import peak_bytes
from mlx_ttd.streaming import parse_size

PROMPT = 64


class Budget:
    """This library on a store under a budget. Prompts are random tokens of a seed."""

    def __init__(self, store: str, memory: str, device: str, options: dict[str, Any]):
        mx.set_default_device(mx.gpu if device == "gpu" else mx.cpu)
        mx.eval(mx.zeros(8) + 1)
        self.base = peak_bytes()
        self.llm = mlx_ttd.load(store, memory=memory, progress=False, **options)

    def generate(self, seed: int, tokens: int) -> dict[str, Any]:
        """Figures of one generation of `tokens` tokens from a prompt of PROMPT."""
        prompt = np.random.default_rng(seed).integers(0, self.llm.store.spec.vocab, PROMPT).tolist()
        self.llm.stats(reset=True)
        response = self.llm.generate(prompt, max_tokens=tokens, temperature=1.0, top_k=0, seed=seed, ignore_eos=True)
        counts, spec = self.llm.stats().counters, self.llm.store.spec
        layout = self.llm.store.layouts[0]
        assert layout is not None
        steps, misses = len(response.tokens) - 1, sum(response.step_misses[1:])
        return {
            "tok_s": response.tokens_per_second,
            "hit_rate": 1 - misses / (steps * spec.top_k * len(spec.layer_types)),
            "bytes_a_token": misses * layout.stride / steps,
            "read_gb_s": counts.bytes_read / max(1e-9, counts.read_seconds) / 1e9,
            "host_syncs_a_token": counts.host_syncs / max(1, counts.decode_steps),
            "first_token_s": response.first_token_seconds,
            "digest": response.digest + response.logits_digest,
        }

    def about(self) -> dict[str, Any]:
        """The division of the budget and the peak over it."""
        division = self.llm.division
        over = max(0, peak_bytes() - self.base - division.total)
        return {"division": asdict(division), "over_budget_bytes": over, "kernels": dict(self.llm.stats().kernels)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--memory", nargs="+", default=["3GB", "6GB"])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="of mlx_ttd.load")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    options = load_options(arguments.option)
    for memory in arguments.memory:
        parse_size(memory)
    effective = {"memory": arguments.memory, "tokens": arguments.tokens, "device": arguments.device, **options}
    block = Block("budgets", effective, arguments.store)
    block.note("cache", f"banks cold in round 0, then warm; files {options.get('read_mode', 'cached')}, state unknown")
    arms: dict[str, Arm] = {}
    found: dict[str, list[dict[str, Any]]] = {memory: [] for memory in arguments.memory}
    try:
        for memory in arguments.memory:
            arms[memory] = Arm(Budget, str(arguments.store), memory, arguments.device, options)
        for seed in range(arguments.rounds + 1):
            for memory, arm in arms.items():
                found[memory].append(arm.ask("generate", seed, arguments.tokens))
        about = {memory: arm.ask("about") for memory, arm in arms.items()}
    finally:
        for arm in arms.values():
            arm.__exit__()
    for memory, rounds in found.items():
        block.note(f"{memory} division", about[memory]["division"])
        speeds = [r["tok_s"] for r in rounds]
        block.note(f"{memory} tok/s", f"first {speeds[0]:.3g}, then {spread(speeds[1:])}")
        for name in ("tok_s", "hit_rate", "bytes_a_token", "read_gb_s", "host_syncs_a_token", "first_token_s"):
            block.results[f"{memory}.{name}"] = statistics.median(r[name] for r in rounds[1:])
        block.results[f"{memory}.over_budget_bytes"] = about[memory]["over_budget_bytes"]
    digests = {tuple(r["digest"] for r in rounds) for rounds in found.values()}
    if len(found) > 1:
        block.results["same_tokens_and_logits"] = float(len(digests) == 1)
    block.note("digest", found[arguments.memory[0]][-1]["digest"][:16])
    block.finish(arguments.json)


if __name__ == "__main__":
    command.run(main)
