"""A whole model of Qwen3.6-35B-A3B's shapes, int4, all in a GPU's memory: this library and mlx-lm in one run.

    python -m benchmarks.gpu_model [--layers N] [--arms ours mlx_lm] [--prompt N] [--json FILE]

Random weights, made on the GPU; 40 layers take 21 GB for each library. Decode is greedy, one token after another, after
the prompt; times are medians of alternated rounds. The first round of each compiles, which takes minutes, and is told
apart; kernels stay compiled on disk.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from benchmarks import command
from benchmarks.commits import commit
from benchmarks.gpu_kernels import copy_bandwidth, machine
from benchmarks.random_weights import random_records, random_weight
from benchmarks.synthetic_store import read_shape
from mlx_ttd import kernels
from mlx_ttd.kernels import Weight
from mlx_ttd.layers import Linear
from mlx_ttd.models import Model
from mlx_ttd.observe import Counters
from mlx_ttd.spec import ModelSpec, Quantisation, RecordLayout, model_spec, record_layout, trunk_tensors
from mlx_ttd.streaming import Lease

STEPS = 48
PLAIN = ("moe.router", "shared.scale", "gdn.in_a", "gdn.in_b")
INT4 = Quantisation(4, 64)


class RandomWeights:
    """Stands in for ResidentWeights: each tensor random, of its own shape."""

    def __init__(self, spec: ModelSpec):
        self.tensors = {t.name: t for t in trunk_tensors(spec)}
        self.nbytes = 0

    def linear(self, name: str) -> Linear:
        rows, cols = self.tensors[name].shape
        if self.tensors[name].role in PLAIN:
            weight = Weight((mx.random.normal((rows, cols)) * 0.02).astype(mx.bfloat16))
        else:
            weight = random_weight(rows, cols, 4, len(name) + rows)
        mx.eval(weight.arrays)
        self.nbytes += weight.nbytes
        return Linear(weight)

    def vector(self, name: str) -> mx.array:
        return mx.random.uniform(-0.5, 0.5, self.tensors[name].shape)

    def norm(self, name: str) -> mx.array:
        return mx.ones(self.tensors[name].shape)


class ResidentExperts:
    """Stands in for ExpertProvider: every expert of every layer in memory."""

    def __init__(self, spec: ModelSpec):
        self.counters, self.next_layer = Counters(), None
        self._layout = record_layout(spec.hidden, spec.inter, INT4, INT4)
        self.slot_of = mx.arange(spec.experts).astype(mx.int32)
        self.banks = [random_records(self._layout, spec.experts, layer) for layer in range(len(spec.layer_types))]
        mx.eval(self.slot_of)

    def layout(self, layer: int) -> RecordLayout:
        return self._layout

    def begin_call(self, layer: int, frame: FrameType) -> None:
        pass

    def end_call(self, call: None) -> None:
        pass

    def whole(self, layer: int) -> Lease:
        return Lease(self.banks[layer], self.slot_of, lambda after: None, np.arange(self.slot_of.size))

    def count_later(self, layer: int, ids: mx.array) -> None:
        pass

    def resident(self, layer: int, ids: mx.array) -> Lease:
        return self.whole(layer)

    def waves(self, layer: int, ids: np.ndarray) -> Iterator[Lease]:
        yield self.whole(layer)


def our_model(spec: ModelSpec) -> Model:
    weights: Any = RandomWeights(spec)
    provider: Any = ResidentExperts(spec)
    table = (mx.random.normal((spec.vocab, spec.hidden)) * 0.5).astype(mx.bfloat16)
    mx.eval(table)
    embedding: Any = lambda ids, dtype: table[mx.array(ids)]  # noqa: E731
    model = Model(spec, weights, provider, embedding, mx.bfloat16, 16, 4096)
    mx.eval(model.parameters())
    read = weights.nbytes + len(spec.layer_types) * spec.top_k * provider.layout(0).stride
    model.bytes_a_token = read
    return model


def their_model(config: dict[str, Any]) -> nn.Module:
    from mlx_lm.models import qwen3_5_moe

    model = qwen3_5_moe.Model(qwen3_5_moe.ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)

    def bits(path: str, module: nn.Module) -> Any:
        if not hasattr(module, "to_quantized"):
            return False
        return {"group_size": 64, "bits": 8} if path.endswith(("mlp.gate", "shared_expert_gate")) else True

    nn.quantize(model, 64, 4, class_predicate=bits)
    for layer in model.layers:
        mx.eval(layer.parameters())
    mx.eval(model.parameters())
    return model


@dataclass(frozen=True)
class Round:
    """Seconds of the prefill, of each decode step, and of the host's part in each, and the tokens."""

    prefill: float
    steps: list[float]
    host: list[float]
    tokens: list[int]


def our_round(model: Model, tokens: np.ndarray) -> Round:
    state = model.make_cache()
    mx.eval([s.state for s in state])
    began = time.perf_counter()
    mx.eval(model.hidden_states(model.embed(tokens), state, "prefill"), [s.state for s in state])
    round_ = Round(time.perf_counter() - began, [], [], [])
    token = int(tokens[-1])
    for _ in range(STEPS):
        began = time.perf_counter()
        hidden = model.hidden_states(model.embed(np.array([token])), state, "decode")
        chosen = mx.argmax(model.logits(hidden, "decode")[0])
        mx.async_eval(chosen)
        round_.host.append(time.perf_counter() - began)
        token = int(chosen.item())  # type: ignore[arg-type]
        round_.steps.append(time.perf_counter() - began)
        round_.tokens.append(token)
    mx.clear_cache()
    return round_


def their_round(model: Any, tokens: np.ndarray) -> Round:
    from mlx_lm.generate import generate_step
    from mlx_lm.models.cache import make_prompt_cache

    cache = make_prompt_cache(model)
    began = time.perf_counter()
    model(mx.array(tokens)[None], cache=cache)
    mx.eval([c.state for c in cache])
    round_ = Round(time.perf_counter() - began, [], [], [])
    began = time.perf_counter()
    for token, _ in generate_step(mx.array(tokens[-1:]), model, max_tokens=STEPS, prompt_cache=cache):
        round_.steps.append(time.perf_counter() - began)
        round_.tokens.append(int(token))
        began = time.perf_counter()
    mx.clear_cache()
    return round_


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--arms", nargs="+", choices=("ours", "mlx_lm"), default=["ours", "mlx_lm"])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    mx.set_default_device(mx.gpu)
    config = read_shape("qwen3.6-35b-a3b", arguments.layers)
    tokens = np.random.default_rng(1).integers(0, 248_000, arguments.prompt)
    results: dict[str, float] = {"copy_gb_s": copy_bandwidth()}
    runs: dict[str, Callable[[], Round]] = {}
    if "ours" in arguments.arms:
        ours = our_model(model_spec(config))
        results["decode.floor_ms"] = ours.bytes_a_token / results["copy_gb_s"] / 1e6
        runs["ours"] = partial(our_round, ours, tokens)
    if "mlx_lm" in arguments.arms:
        runs["mlx_lm"] = partial(their_round, their_model(config), tokens)
    for arm, run in runs.items():
        began = time.perf_counter()
        first = run()
        results[f"{arm}.first_round_s"] = time.perf_counter() - began
        results[f"{arm}.first_prefill_s"] = first.prefill
        print(f"{arm}: first round {results[f'{arm}.first_round_s']:.1f} s, prefill {first.prefill:.1f} s", flush=True)
    rounds: dict[str, list[Round]] = {arm: [] for arm in runs}
    for _ in range(arguments.rounds):
        for arm, run in runs.items():
            rounds[arm].append(now := run())
            step = statistics.median(now.steps[1:])
            print(f"{arm}: prefill {now.prefill * 1e3:.0f} ms, decode {step * 1e3:.2f} ms {now.tokens[:4]}", flush=True)
    for arm, done in rounds.items():
        results[f"{arm}.prefill_ms"] = statistics.median(r.prefill for r in done) * 1e3
        results[f"{arm}.decode_ms"] = statistics.median(t for r in done for t in r.steps[1:]) * 1e3
        if done[0].host:
            results[f"{arm}.decode_host_ms"] = statistics.median(t for r in done for t in r.host[1:]) * 1e3
    if len(rounds) == 2:
        results["decode.vs_mlx_lm"] = results["mlx_lm.decode_ms"] / results["ours.decode_ms"]
        results[f"prefill_{arguments.prompt}.vs_mlx_lm"] = results["mlx_lm.prefill_ms"] / results["ours.prefill_ms"]
    for name, value in results.items():
        print(f"{name:24} {value:10.3f}")
    print("kernels:", kernels.used)
    if arguments.json:
        found = {"machine": machine(), "results": results, "commit": commit()}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    command.run(main)
