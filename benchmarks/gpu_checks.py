"""The GPU kernels on small random input: how far from their references, and whether bit for bit as in the simulator.

    python -m benchmarks.gpu_checks

gpu_goldens.json holds what the kernels' texts give on a CPU (tests/metal_sim). A GPU must give the same bits where only
sums, products, fused multiply-adds and conversions are involved, and may differ in the last ones of an exponential.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from benchmarks import command
from benchmarks.random_weights import random_lease, random_weight
from mlx_ttd import kernels
from mlx_ttd.kernels import Weight
from mlx_ttd.spec import Quantisation, record_layout

GOLDENS = Path(__file__).with_name("gpu_goldens.json")


@dataclass(frozen=True)
class Check:
    """A kernel's largest difference relative to the reference's largest number, and the hash of its f32 output."""

    difference: float
    digest: str


def calls() -> dict[str, Callable[[], mx.array]]:
    generator = np.random.default_rng(7)

    def numbers(*shape: int) -> mx.array:
        return mx.array(generator.standard_normal(shape, np.float32))

    layout = record_layout(256, 128, Quantisation(4, 64), Quantisation(4, 64))
    lease = random_lease(layout, 16, 5)
    x, narrow = numbers(9, 256), numbers(3, 64)
    rows = mx.array(np.sort(generator.permuted(np.tile(np.arange(16), (9, 1)), axis=1)[:, :4], axis=1).astype(np.int32))
    shares = mx.array(generator.dirichlet(np.ones(4), 9).astype(np.float32))
    packed, plain = random_weight(320, 256, 4, 9), Weight(numbers(64, 256))
    bytes_, halves = random_weight(64, 256, 8, 10), Weight(numbers(64, 256).astype(mx.bfloat16))
    qkv, a, b = numbers(5, 256), numbers(5, 2), numbers(5, 2)
    conv = numbers(3, 256), numbers(256, 4), numbers(2), numbers(2)
    state, query, keys, values = numbers(2, 64, 64), numbers(2, 4, 64), numbers(2, 40, 64), numbers(2, 40, 64)
    norm, wide_norm = numbers(64), numbers(256)

    def routed() -> kernels.Routed:
        return kernels.route(x[:1], x[1:2], wide_norm, 1e-6, plain, 4, "decode")

    return {
        "linear_int4": lambda: kernels.linear(x, packed, "decode"),
        "linear_int4_prefill": lambda: kernels.linear(x, packed, "prefill"),
        "linear_int8": lambda: kernels.linear(x, bytes_, "decode"),
        "linear_bf16": lambda: kernels.linear(x, halves, "decode"),
        "linear_f32": lambda: kernels.linear(x, plain, "decode"),
        "combine": lambda: kernels.combine(values.reshape(20, 4, 64), mx.tile(shares[:1], (20, 1))),
        "rms_norm": lambda: kernels.rms_norm(narrow, norm, 1e-6),
        "expert_ffn": lambda: kernels.expert_ffn(x, lease, rows, shares, layout),
        "expert_contributions": lambda: kernels.expert_contributions(x, lease, rows, layout),
        "expert_ffn_accumulate": lambda: kernels.expert_ffn_accumulate(x, x, lease, rows, shares, layout),
        "router_weights": lambda: kernels.router(x, plain, 4, "decode")[1],
        "route": lambda: mx.concatenate([part.astype(mx.float32) for part in routed()[:3]], axis=1),
        "route_weights": lambda: routed().weights,
        "gated_delta": lambda: kernels.gated_delta(qkv, a, b, *conv, state, 1, "decode").out,
        "attention": lambda: kernels.attention(query, keys, values, 30, query, 0.125, "verify"),
        "attention_prefill": lambda: kernels.attention(query, keys, values, 30, query, 0.125, "prefill"),
    }


def check_kernels() -> dict[str, Check]:
    """Runs every kernel in f32 on the default device."""
    checked = {}
    for name, call in calls().items():
        with kernels.forced("gpu"):
            got = call()
        mx.eval(got)
        # CUDA has no float32 gather_qmm, so the references run on the CPU.
        with kernels.forced("reference"), mx.stream(mx.cpu):
            wanted = call()
            difference = (mx.abs(got - wanted).max() / mx.abs(wanted).max()).item()
        digest = hashlib.sha256(np.array(got).tobytes()).hexdigest()[:16]
        checked[name] = Check(difference, digest)  # type: ignore[arg-type]
    return checked


def report(checked: dict[str, Check]) -> None:
    """Print a line for each kernel."""
    goldens = json.loads(GOLDENS.read_text())
    for name, check in checked.items():
        bits = "the simulator's bits" if goldens.get(name) == check.digest else "other bits than the simulator's"
        print(f"{name:22} {check.difference:9.1e} {check.digest} {bits}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    mx.set_default_device(mx.gpu)
    report(check_kernels())


if __name__ == "__main__":
    command.run(main)
