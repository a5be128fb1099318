"""The native CPU operations at the shapes of Qwen3.6-35B-A3B, as ratios taken in one run.

    python -m benchmarks.cpu_kernels [--json FILE] [--quick]

Takes about three minutes, less than one with --quick, and 4 GB. Each round times every arm after the other; a figure
is the median over rounds. Each arm reads over 400 MB in turn, so that no cache holds its weights; the bandwidth is that
of all threads reading over such memory. MLX's arm is `mx.gather_qmm` in f32; sgemm is numpy's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np

from benchmarks import command
from benchmarks.bandwidth import read_bandwidth
from benchmarks.block import Block, spread
from mlx_ttd import kernels
from mlx_ttd.kernels import Weight
from mlx_ttd.kernels.native import extension
from mlx_ttd.spec import Quantisation, record_layout

HIDDEN, INTER, EXPERTS, TOP_K, VOCABULARY = 2048, 512, 256, 8, 248_320
KEY_HEADS, VALUE_HEADS, HEAD_DIM, TOKENS = 16, 32, 128, 512
WIDTH, VALUE_WIDTH = 2 * KEY_HEADS * HEAD_DIM + VALUE_HEADS * HEAD_DIM, VALUE_HEADS * HEAD_DIM
EPS, CUBE, COLD = 1e-6, 2048, 400_000_000
LAYOUT = record_layout(HIDDEN, INTER, Quantisation(4, 64), Quantisation(4, 64))
RNG = np.random.default_rng(0)


def filled(dtype: Any, *shape: int) -> np.ndarray:
    """Random bytes, made from 16 MB of them so that a gigabyte takes no time."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    some = RNG.integers(0, 256, min(size, 1 << 24), dtype=np.uint8)
    return np.resize(some, size).view(dtype).reshape(shape)


def halves(low: float, high: float, *shape: int) -> mx.array:
    """Random bf16 numbers."""
    some = mx.array(RNG.uniform(low, high, 1 << 16).astype(np.float32)).astype(mx.bfloat16)
    return mx.array(np.resize(np.array(some.view(mx.uint16)), shape)).view(mx.bfloat16)


def random_weight(rows: int, cols: int, bits: int) -> Weight:
    """Of about unit gain; bf16 for 16 bits, else affine codes in groups of 64."""
    if bits == 16:
        return Weight(halves(-1.7 / cols**0.5, 1.7 / cols**0.5, rows, cols))
    step = 3.4 / cols**0.5 / 2**bits
    scales = halves(0.9 * step, 1.1 * step, rows, cols // 64)
    codes = mx.array(filled(np.uint32, rows, cols * bits // 32))
    return Weight(codes, scales, scales * -(2.0 ** (bits - 1)), bits, 64, "affine")


def random_lease() -> SimpleNamespace:
    """All experts of a layer, 453 MB."""
    records = filled(np.uint8, EXPERTS, LAYOUT.stride).copy()
    for m in (LAYOUT.gate_up, LAYOUT.down):
        w = random_weight(m.rows, m.cols, 4)
        for part, offset in ((w.scales, m.scales), (w.biases, m.biases)):
            assert part is not None
            assert offset is not None
            data = np.array(part.view(mx.uint8)).reshape(-1)
            records[:, offset : offset + data.size] = data
    return SimpleNamespace(records=mx.array(records), slot_of=mx.arange(EXPERTS, dtype=mx.int32), outputs=[])


def choices(tokens: int) -> mx.array:
    return mx.array(np.sort(RNG.random((tokens, EXPERTS)).argsort(axis=1)[:, :TOP_K]).astype(np.int32))


def normal(*shape: int) -> mx.array:
    return mx.array(RNG.standard_normal(shape).astype(np.float32))


def seconds(make: Callable[[], Any]) -> float:
    began = time.perf_counter()
    mx.eval(make())
    return time.perf_counter() - began


def decode_experts(lease: SimpleNamespace, steps: int) -> tuple[Callable[[], list[mx.array]], int]:
    """Steps that between them read every expert; the bytes they read."""
    x, weights = normal(1, HIDDEN), mx.full((1, TOP_K), 1 / TOP_K)
    shuffled = np.concatenate([RNG.permutation(EXPERTS) for _ in range(-(-steps * TOP_K // EXPERTS))])
    rows = [mx.array(np.sort(r)[None].astype(np.int32)) for r in shuffled[: steps * TOP_K].reshape(steps, TOP_K)]
    mx.eval(x, weights, rows)

    def run() -> list[mx.array]:
        out = [kernels.expert_ffn(x, lease, r, weights, LAYOUT) for r in rows]
        lease.outputs.clear()
        return out

    return run, steps * TOP_K * LAYOUT.stride


def decode_head(bits: int) -> tuple[Callable[[], list[mx.array]], int]:
    """The head from as many copies as exceed the caches; the bytes they read."""
    x, weights = normal(1, HIDDEN), [random_weight(VOCABULARY, HIDDEN, bits)]
    while sum(w.nbytes for w in weights) < COLD:
        weights.append(random_weight(VOCABULARY, HIDDEN, bits))
    mx.eval(x, [a for w in weights for a in w.arrays])
    return lambda: [kernels.head(x, w, None, "decode") for w in weights], sum(w.nbytes for w in weights)


def prefill_layer(lease: SimpleNamespace) -> tuple[Callable[[], mx.array], float]:
    """A whole gated-delta layer over TOKENS tokens with its mixture of experts; the operations of its products."""
    shapes = {"qkv": (WIDTH, HIDDEN), "z": (VALUE_WIDTH, HIDDEN), "out": (HIDDEN, VALUE_WIDTH)}
    shapes |= {
        "a": (VALUE_HEADS, HIDDEN),
        "b": (VALUE_HEADS, HIDDEN),
        "router": (EXPERTS, HIDDEN),
        "scale": (1, HIDDEN),
    }
    shapes |= {"gate": (INTER, HIDDEN), "up": (INTER, HIDDEN), "down": (HIDDEN, INTER)}
    small = ("a", "b", "router", "scale")
    w = {name: random_weight(*shape, 16 if name in small else 4) for name, shape in shapes.items()}
    ones, head_ones, conv = mx.ones((HIDDEN,)), mx.ones((HEAD_DIM,)), halves(-0.5, 0.5, WIDTH, 4)
    gates, state = mx.zeros((VALUE_HEADS,)), mx.zeros((VALUE_HEADS, HEAD_DIM, HEAD_DIM))
    tail, tokens = mx.zeros((3, WIDTH)), normal(TOKENS, HIDDEN)
    operations = 2.0 * TOKENS * (sum(r * c for r, c in shapes.values()) + TOP_K * 3 * HIDDEN * INTER)

    def run() -> mx.array:
        x = kernels.rms_norm(tokens, ones, EPS)
        qkv, z, a, b = (kernels.linear(x, w[name], "prefill") for name in ("qkv", "z", "a", "b"))
        mixed = kernels.gated_delta(qkv, a, b, tail, conv, gates, gates, state, KEY_HEADS, "prefill").out
        mixed = kernels.gated_rms_norm(mixed, z.reshape(TOKENS, VALUE_HEADS, HEAD_DIM), head_ones, EPS)
        h = tokens + kernels.linear(mixed.reshape(TOKENS, VALUE_WIDTH), w["out"], "prefill")
        x = kernels.rms_norm(h, ones, EPS)
        ids, weights = kernels.router(x, w["router"], TOP_K, "prefill")
        shared = kernels.linear(kernels.swiglu_linear(x, w["gate"], w["up"], "prefill"), w["down"], "prefill")
        shared = kernels.sigmoid_scaled(kernels.linear(x, w["scale"], "prefill"), shared)
        routed = kernels.expert_ffn_accumulate(mx.zeros_like(x), x, lease, ids, weights, LAYOUT)
        lease.outputs.clear()
        return h + (routed + shared)

    return run, operations


def delta_steps() -> tuple[Callable[[], list[Any]], int]:
    """One step each on as many states as exceed the caches; as in a model, a step's state replaces the last."""
    count = COLD // (VALUE_HEADS * HEAD_DIM * HEAD_DIM * 4) + 1
    states = [normal(VALUE_HEADS, HEAD_DIM, HEAD_DIM) for _ in range(count)]
    qkv, gate, tail = normal(1, WIDTH), normal(1, VALUE_HEADS), normal(3, WIDTH)
    conv, zeros = mx.array(RNG.standard_normal((WIDTH, 4)).astype(np.float32)), mx.zeros((VALUE_HEADS,))
    mx.eval(states, qkv, gate, tail, conv, zeros)

    def run() -> list[Any]:
        fixed = (qkv, gate, gate, tail, conv, zeros, zeros)
        steps = [kernels.gated_delta(*fixed, state, KEY_HEADS, "decode") for state in states]
        states[:] = [step.state for step in steps]
        return [part for step in steps for part in step]

    return run, count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    arguments = parser.parse_args()
    mx.set_default_device(mx.cpu)
    native: Any = extension()
    rounds = 2 if arguments.quick else 9
    block = Block("cpu_kernels", {"isa": native.isa(), "threads": native.threads(), "rounds": rounds})
    block.note("cache", "cold: each arm reads over 400 MB in turn")

    lease = random_lease()
    experts, expert_bytes = decode_experts(lease, EXPERTS // TOP_K)
    few_experts, few_bytes = decode_experts(lease, 1)
    heads = {name: decode_head(bits) for name, bits in (("int4", 4), ("int8", 8), ("bf16", 16))}
    layer, layer_operations = prefill_layer(lease)
    steps, step_count = delta_steps()
    cube = RNG.standard_normal((CUBE, CUBE)).astype(np.float32)

    def plain() -> float:
        with kernels.forced("reference"):
            return seconds(few_experts)

    found: dict[str, list[float]] = {}

    def add(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)

    for turn in range(rounds + 1):
        bandwidth = read_bandwidth(0.2) * 1e9
        rate = expert_bytes / seconds(experts)
        measured = {"read.gb_s": bandwidth / 1e9, "expert_ffn_t1.fraction_of_bandwidth": rate / bandwidth}
        measured["expert_ffn_t1.vs_mlx"] = rate / (few_bytes / plain())
        for name, (head, size) in heads.items():
            bandwidth = read_bandwidth(0.2) * 1e9
            measured[f"head_{name}.fraction_of_bandwidth"] = size / seconds(head) / bandwidth
        sgemm = 2.0 * CUBE**3 / seconds(lambda: (cube @ cube) is None)
        measured["sgemm.gflops"] = sgemm / 1e9
        measured["prefill_512.vs_sgemm"] = layer_operations / seconds(layer) / sgemm
        measured["gated_delta_step.ms"] = seconds(steps) / step_count * 1e3
        for name, value in measured.items():
            if turn > 0:
                add(name, value)

    for name, values in found.items():
        block.results[name] = statistics.median(values)
        block.note(name, spread(values))
    block.finish(arguments.json)


if __name__ == "__main__":
    command.run(main)
