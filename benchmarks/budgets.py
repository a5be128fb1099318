"""One store under several memory budgets: the same tokens, at what speed, hit rate and peak memory.

    python -m benchmarks.budgets STORE [--memory 3GB 6GB ...] [--tokens N] [--device gpu] [--json FILE] [--keep]

Every budget has a process of its own; they take the same prompts in turn, tokens sampled with the prompt's number as
seed. The first prompt finds an empty bank and is told apart. Records come through the page cache unless
`--option read_mode=direct`. 64 tokens of a 40-layer store take some 20 seconds a round and budget.
"""

from __future__ import annotations

import argparse
import statistics
from collections import OrderedDict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

import mlx_ttd
from benchmarks.arms import Arm
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
        self.llm.generate(prompt, max_tokens=1, temperature=0.0, ignore_eos=True)
        self.llm.stats(reset=True)
        response = self.llm.generate(prompt, max_tokens=tokens, temperature=1.0, top_k=0, seed=seed, ignore_eos=True)
        counts = self.llm.stats().counters
        steps = sum(response.step_misses[1:])
        return {
            "tok_s": response.tokens_per_second,
            "hit_rate": 1 - steps / sum(self.requests(len(response.tokens) - 1)),
            "bytes_read": counts.bytes_read,
            "read_seconds": counts.read_seconds,
            "host_syncs_a_token": counts.host_syncs / max(1, counts.decode_steps),
            "digest": response.digest + response.logits_digest,
        }

    def requests(self, steps: int) -> list[int]:
        """Experts wanted by each of `steps` decode steps."""
        spec = self.llm.store.spec
        return [spec.top_k * len(spec.layer_types)] * steps

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
    parser.add_argument("--keep", action="store_true", help="make this run the one in RESULTS.json")
    arguments = parser.parse_args()
    options = dict(given.split("=", 1) for given in arguments.option)
    for memory in arguments.memory:
        parse_size(memory)
    effective = {"memory": arguments.memory, "tokens": arguments.tokens, "device": arguments.device, **options}
    block = Block("budgets", effective, arguments.store)
    block.note("cache", f"banks cold in round 0, then warm; files {options.get('read_mode', 'cached')}, state unknown")
    arms: OrderedDict[str, Arm] = OrderedDict()
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
        block.note(f"{memory} tok/s", f"first {rounds[0]['tok_s']:.3g}, then {spread([r['tok_s'] for r in rounds[1:]])}")
        for name in ("tok_s", "hit_rate", "host_syncs_a_token"):
            block.results[f"{memory}.{name}"] = statistics.median(r[name] for r in rounds[1:])
        read = sum(r["bytes_read"] for r in rounds)
        block.results[f"{memory}.bytes_a_token"] = read / len(rounds) / arguments.tokens
        block.results[f"{memory}.read_gb_s"] = read / max(1e-9, sum(r["read_seconds"] for r in rounds)) / 1e9
        block.results[f"{memory}.over_budget_bytes"] = about[memory]["over_budget_bytes"]
    digests = {tuple(r["digest"] for r in rounds) for rounds in found.values()}
    block.results["same_tokens_and_logits"] = float(len(digests) == 1)
    block.note("digest", found[arguments.memory[0]][-1]["digest"][:16])
    block.finish(arguments.json, arguments.keep)


if __name__ == "__main__":
    main()
