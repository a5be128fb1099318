"""The GPU kernels against their references and against MLX's own operations, at the shapes of Qwen3.6-35B-A3B.

    python -m benchmarks.gpu_kernels [--json FILE]

Runs on Metal and CUDA alike; takes about two minutes and 4 GB of GPU memory. Every timed call reads other weights than
the one before, and 128 calls are chained by their values in one evaluation; launches are included.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import numpy as np

from benchmarks import command
from benchmarks.commits import commit
from benchmarks.gpu_checks import check_kernels
from benchmarks.gpu_checks import report as report_checks
from benchmarks.random_weights import random_lease, random_weight
from mlx_ttd import kernels
from mlx_ttd.kernels import Weight
from mlx_ttd.spec import Quantisation, record_layout

HIDDEN, INTER, EXPERTS, TOP_K, VOCABULARY = 2048, 512, 256, 8, 248_320
CALLS, REPEATS = 128, 7
EPS = 1e-6
Step = Callable[[mx.array, int], mx.array]


def random_rows(calls: int, experts: int, key: int) -> list[mx.array]:
    """Ascending choices [1, k] a call, each of which reads experts that the last 400 MB did not hold."""
    generator = np.random.default_rng(key)
    rounds = np.concatenate([generator.permutation(experts) for _ in range(-(-calls * TOP_K // experts))])
    return [mx.array(np.sort(c)[None].astype(np.int32)) for c in rounds[: calls * TOP_K].reshape(calls, TOP_K)]


def microseconds(step: Step, start: mx.array) -> float:
    """Median time of one of CALLS chained calls of `step`, their graph traced once by mx.compile."""

    def chain(x: mx.array) -> mx.array:
        for i in range(CALLS):
            x = step(x, i)
        return x

    compiled = mx.compile(chain)
    times = []
    for _ in range(REPEATS + 2):
        began = time.perf_counter()
        mx.eval(compiled(start))
        times.append((time.perf_counter() - began) / CALLS * 1e6)
    return statistics.median(times[2:])


def copy_bandwidth() -> float:
    """GB/s of x + 1 over 1 GB, counting bytes read and written."""
    x = mx.zeros((1 << 28,), mx.float32)
    mx.eval(x)
    best = min(timed(lambda: x + 1) for _ in range(8))
    return 2 * x.nbytes / best / 1e9


def timed(make: Callable[[], mx.array]) -> float:
    began = time.perf_counter()
    mx.eval(make())
    return time.perf_counter() - began


def expert_arms(bits: int) -> tuple[dict[str, Step], int]:
    layout = record_layout(HIDDEN, INTER, Quantisation(bits, 64), Quantisation(bits, 64))
    lease = random_lease(layout, EXPERTS, 1)
    rows = random_rows(CALLS, EXPERTS, 2)
    weights = mx.full((1, TOP_K), 1 / TOP_K)
    gate_up, down = (
        [mx.contiguous(p) for p in kernels.part_views(lease.records, matrix) if p is not None]
        for matrix in (layout.gate_up, layout.down)
    )
    slots = [lease.slot_of[r] for r in rows]
    mx.eval(lease.records, rows, weights, gate_up, down, slots)
    swiglu = mx.compile(lambda gate, up: gate * mx.sigmoid(gate) * up, shapeless=True)

    def ours(x: mx.array, i: int) -> mx.array:
        return kernels.expert_ffn(mx.fast.rms_norm(x, None, EPS), lease, rows[i], weights, layout)

    def gathered(x: mx.array, matrix: list[mx.array], i: int) -> mx.array:
        w, scales, biases = matrix
        return mx.gather_qmm(x, w, scales, biases, rhs_indices=slots[i], transpose=True, group_size=64, bits=bits)

    def mlx_experts(x: mx.array, i: int) -> mx.array:
        y = gathered(mx.fast.rms_norm(x, None, EPS).reshape(1, 1, 1, HIDDEN), gate_up, i)
        return gathered(swiglu(y[..., :INTER], y[..., INTER:]), down, i)

    def mlx_pair(x: mx.array, i: int) -> mx.array:
        return mlx_experts(x, i)[:, i % TOP_K, 0]

    def mlx_sum(x: mx.array, i: int) -> mx.array:
        y = mlx_experts(x, i)
        return (y[:, :, 0] * weights[..., None].astype(y.dtype)).sum(axis=1)

    read = TOP_K * sum(m.codes_bytes + 2 * m.scales_bytes for m in (layout.gate_up, layout.down))
    return {"ours": ours, "mlx": mlx_pair, "mlx_sum": mlx_sum}, read


def matrix_arms(w: list[Weight], head: bool) -> dict[str, Step]:
    cols = w[0].weight.shape[1] * 32 // w[0].bits if w[0].mode == "affine" else w[0].weight.shape[1]

    def ours(x: mx.array, i: int) -> mx.array:
        x, used = x[:, :cols], w[i % len(w)]
        return kernels.head(x, used, None, "decode") if head else kernels.linear(x, used, "decode")

    def theirs(x: mx.array, i: int) -> mx.array:
        x, used = x[:, :cols], w[i % len(w)]
        if used.mode == "plain":
            return x @ used.weight.T
        assert used.scales is not None
        return mx.quantized_matmul(x, used.weight, used.scales, used.biases, True, used.group, used.bits)

    return {"ours": ours, "mlx": theirs}


def machine() -> dict[str, str]:
    """What the figures were taken on."""
    return {
        "device": str(mx.device_info().get("device_name", "unknown")),
        "system": platform.platform(),
        "mlx": version("mlx"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    mx.set_default_device(mx.gpu)
    print(machine())
    results: dict[str, float] = {}
    checked = check_kernels()
    report_checks(checked)
    results |= {f"{name}.difference": check.difference for name, check in checked.items()}
    results["copy_gb_s"] = copy_bandwidth()
    print(f"copy {results['copy_gb_s']:.0f} GB/s")

    start = mx.random.normal((1, HIDDEN), key=mx.random.key(3))

    def report(name: str, arms: dict[str, Step], read: int, idle: float) -> None:
        used = {"ours": microseconds(arms["ours"], start) - idle}
        for arm, step in arms.items():
            if arm != "ours":
                used[arm] = microseconds(step, start.astype(mx.bfloat16)) - idle
                results[f"{name}.vs_{arm}"] = used[arm] / used["ours"]
        results[f"{name}.us"], results[f"{name}.gb_s"] = used["ours"], read / used["ours"] / 1e3
        print(f"{name:16} {read / 1e6:7.1f} MB {results[f'{name}.gb_s']:6.0f} GB/s ", end="")
        print("  ".join(f"{arm} {t:.1f} us" for arm, t in used.items()))

    norm = microseconds(lambda x, i: mx.fast.rms_norm(x, None, EPS), start)
    print(f"the norm between expert calls, taken off both arms: {norm:.1f} us")
    results["norm.us"] = norm
    arms, read = expert_arms(4)
    report("expert_ffn_t1", arms, read, norm)
    for bits in (4, 8):
        w = [random_weight(VOCABULARY, HIDDEN, bits, k) for k in (11, 12)]
        mx.eval([v.arrays for v in w])
        report(f"head_int{bits}", matrix_arms(w, True), w[0].nbytes, 0.0)
    w = [Weight((mx.random.normal((VOCABULARY, HIDDEN)) / HIDDEN**0.5).astype(mx.bfloat16))]
    mx.eval(w[0].weight)
    report("head_bf16", matrix_arms(w, True), w[0].nbytes, 0.0)
    for rows, cols in ((8192, 2048), (2048, 4096)):
        w = [random_weight(rows, cols, 4, k) for k in range(400_000_000 // (rows * cols * 9 // 16) + 1)]
        mx.eval([v.arrays for v in w])
        if rows >= cols:
            report(f"linear_{cols}_{rows}", matrix_arms(w, False), w[0].nbytes, 0.0)
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"machine": machine(), "results": results, "commit": commit()}, indent=1) + "\n"
        )


if __name__ == "__main__":
    command.run(main)
