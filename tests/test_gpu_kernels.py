"""The GPU kernels' very texts, run on the CPU by tests/metal_sim and compiled for CUDA by NVRTC."""

from __future__ import annotations

import json
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import metal_sim
import mlx.core as mx
import numpy as np
import pytest
from metal_sim import cuda_check, nvrtc

import mlx_ttd
from benchmarks import gpu_checks
from mlx_ttd import kernels
from mlx_ttd.errors import KernelError
from mlx_ttd.kernels import Mode, Weight, backend, first_use, gpu, gpu_experts, gpu_linear, gpu_router
from mlx_ttd.spec import Quantisation, RecordLayout, record_layout

REASON = metal_sim.why_not()
needs_sim = pytest.mark.skipif(REASON is not None, reason=str(REASON))
CUDA_REASON = nvrtc.why_not()
needs_nvrtc = pytest.mark.skipif(CUDA_REASON is not None, reason=str(CUDA_REASON))

ROWS = (1, 2, 9, 31, 32, 33)
ORDERS: tuple[dict[str, Any], ...] = (
    {"order": "reverse"},
    {"order": "shuffle", "seed": 1},
    {"order": "shuffle", "seed": 2},
)
EXPERTS, TOP_K = 6, 3
DEMO = Path(mlx_ttd.__file__).parent / "demo" / "store"
MATRICES = ("w", "v", "gate", "up", "down")
WEIGHTS = {
    "records",
    "scales",
    "biases",
    "w",
    "v",
    "a_w",
    "b_w",
    *(f"{m}_{part}" for m in MATRICES for part in ("w", "scales", "biases")),
}
Call = Callable[[], Any]


def numbers(key: int, *shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(np.random.default_rng(key).standard_normal(shape, np.float32)).astype(dtype)


def packed(key: int, rows: int, cols: int, bits: int, group: int, dtype: mx.Dtype = mx.bfloat16) -> Weight:
    codes, scales, biases = mx.quantize(numbers(key, rows, cols).astype(dtype), group, bits)
    return Weight(codes, scales, biases, bits, group, "affine")


def make_lease(layout: RecordLayout, absent: int = 4) -> SimpleNamespace:
    """EXPERTS random experts in reversed slots; the one numbered `absent` is not leased."""
    records = np.zeros((EXPERTS, layout.stride), np.uint8)
    dtypes = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}
    for slot in range(EXPERTS):
        for m in (layout.gate_up, layout.down):
            w = packed(2 * slot + (m is layout.down), m.rows, m.cols, m.bits, m.group, dtypes[m.scale_dtype])
            for array, start in ((w.weight, m.codes), (w.scales, m.scales), (w.biases, m.biases)):
                data = np.array(array.view(mx.uint8)).reshape(-1)
                records[slot, start : start + len(data)] = data
    table = np.arange(EXPERTS, dtype=np.int32)[::-1].copy()
    table[absent] = -1
    return SimpleNamespace(records=mx.array(records), slot_of=mx.array(table), outputs=deque(maxlen=1))


def uneven_rows(tokens: int) -> mx.array:
    """Ascending choices [tokens, TOP_K]: expert 5 in every row, the unleased 4 in some, 0 in none."""
    generator = np.random.default_rng(tokens)
    others = np.array([generator.permutation([1, 2, 3, 4])[: TOP_K - 1] for _ in range(tokens)])
    return mx.array(np.sort(np.concatenate([others, np.full((tokens, 1), 5)], axis=1), axis=1).astype(np.int32))


def expert_call(op: str, tokens: int, bits: int = 4, group: int = 64, dtype: mx.Dtype = mx.float32) -> Call:
    layout = record_layout(256, 128, Quantisation(bits, group), Quantisation(bits, group))
    lease, rows = make_lease(layout), uneven_rows(tokens)
    x, acc = numbers(1, tokens, 256).astype(dtype), numbers(2, tokens, 256)
    weights = mx.softmax(numbers(3, tokens, TOP_K), axis=-1)
    if op == "expert_contributions":
        return lambda: kernels.expert_contributions(x, lease, rows, layout)
    if op == "expert_ffn":
        return lambda: kernels.expert_ffn(x, lease, rows, weights, layout)
    return lambda: kernels.expert_ffn_accumulate(acc, x, lease, rows, weights, layout)


def moe_inputs(tokens: int, bits: int, dtype: mx.Dtype) -> tuple[Any, ...]:
    layout = record_layout(256, 128, Quantisation(bits, 64), Quantisation(bits, 64))
    shared = kernels.SharedExpert(
        packed(21, 128, 256, bits, 64),
        packed(22, 128, 256, bits, 64),
        packed(23, 256, 128, bits, 64),
        Weight(numbers(24, 1, 256, dtype=mx.bfloat16)),
    )
    rows, weights = uneven_rows(tokens), mx.softmax(numbers(3, tokens, TOP_K), axis=-1)
    residual, x = numbers(1, tokens, 256, dtype=dtype), numbers(2, tokens, 256, dtype=dtype)
    return residual, x, make_lease(layout, absent=0), rows, weights, layout, shared


def delta_weights(plain: mx.Dtype) -> Any:
    a, b = (Weight(numbers(key, 6, 256, dtype=plain)) for key in (3, 4))
    return SimpleNamespace(qkv=packed(1, 70, 256, 4, 64), z=packed(2, 40, 256, 4, 64), a=a, b=b)


def delta_inputs_call(tokens: int, plain: mx.Dtype) -> Call:
    return lambda: kernels.delta_inputs(numbers(5, tokens, 256), delta_weights(plain), "verify")


def moe_call(tokens: int, bits: int = 4) -> Call:
    inputs = moe_inputs(tokens, bits, mx.float32)
    return lambda: kernels.moe(*inputs, "decode")


def linear_call(tokens: int, w: Weight, mode: str) -> Call:
    x = numbers(4, tokens, w.weight.shape[1] * (32 // w.bits if w.mode == "affine" else 1))
    return lambda: kernels.head(x, w, None, mode)  # type: ignore[arg-type]


def gated_delta_inputs(tokens: int, dtype: mx.Dtype = mx.float32) -> tuple[Any, ...]:
    key_heads, value_heads, dim = 1, 2, 32
    channels = 2 * key_heads * dim + value_heads * dim
    return (
        numbers(1, tokens, channels, dtype=dtype),
        numbers(2, tokens, value_heads, dtype=dtype),
        numbers(3, tokens, value_heads, dtype=dtype),
        numbers(4, 3, channels, dtype=dtype),
        numbers(5, channels, 4) * 0.5,
        numbers(6, value_heads),
        numbers(7, value_heads),
        numbers(8, value_heads, dim, dim) * 0.1,
        key_heads,
    )


def gated_delta_call(tokens: int, dtype: mx.Dtype = mx.float32) -> Call:
    inputs = gated_delta_inputs(tokens, dtype)
    return lambda: tuple(kernels.gated_delta(*inputs, "prefill"))


def router_call(tokens: int, experts: int, k: int) -> Call:
    x, w = numbers(1, tokens, 64), Weight(numbers(2, experts, 64, dtype=mx.bfloat16))
    return lambda: kernels.router(x, w, k, "decode")


def route_inputs(tokens: int, experts: int, width: int, dtype: mx.Dtype = mx.float32) -> tuple[Any, ...]:
    x, y = numbers(1, tokens, width, dtype=dtype), numbers(2, tokens, width, dtype=dtype)
    return x, y, numbers(3, width), 1e-6, Weight(numbers(5, experts, width, dtype=dtype))


def route_call(tokens: int, experts: int, k: int) -> Call:
    inputs = route_inputs(tokens, experts, 256)

    def call() -> tuple[mx.array, ...]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gpu_router, "in_one_launch", lambda tokens: True)
            return kernels.route(*inputs, k, "decode")

    return call


def attention_call(tokens: int, offset: int, head_dim: int, gated: bool = True, mode: Mode = "verify") -> Call:
    q, gate = numbers(1, tokens, 4, head_dim), numbers(2, tokens, 4, head_dim)
    keys, values = (numbers(key, 2, offset + tokens + 5, head_dim) for key in (3, 4))
    return lambda: kernels.attention(q, keys, values, offset, gate if gated else None, head_dim**-0.5, mode)


def coded_attention_call(tokens: int, offset: int, head_dim: int, group: int, mode: Mode = "verify") -> Call:
    q, gate = numbers(1, tokens, 4, head_dim), numbers(2, tokens, 4, head_dim)
    kept = [kernels.quantise_rows(numbers(key, 2, offset + tokens + 5, head_dim), group) for key in (3, 4)]
    return lambda: kernels.attention(q, *kept, offset, gate, head_dim**-0.5, mode)


CASES: dict[str, Call] = {
    **{f"{op} T={t}": expert_call(op, t) for op in ("expert_ffn", "expert_ffn_accumulate") for t in ROWS},
    "expert_contributions": expert_call("expert_contributions", 9),
    "moe": moe_call(1),
    "moe int8": moe_call(3, bits=8),
    "experts int4 group 32": expert_call("expert_ffn", 2, group=32),
    "experts int8": expert_call("expert_ffn", 2, bits=8),
    "experts int8 prefill": expert_call("expert_ffn_accumulate", 9, bits=8),
    "experts bf16": expert_call("expert_ffn", 2, dtype=mx.bfloat16),
    "experts f16 prefill": expert_call("expert_ffn_accumulate", 9, dtype=mx.float16),
    **{
        f"int4 {mode} T={t}": linear_call(t, packed(5, 70, 192, 4, 64), mode)
        for mode in ("decode", "prefill")
        for t in ROWS
    },
    "int4 whole lines": linear_call(1, packed(6, 64, 1024, 4, 32), "decode"),
    "int8": linear_call(2, packed(7, 33, 256, 8, 64), "decode"),
    "int8 prefill": linear_call(9, packed(7, 33, 256, 8, 64), "prefill"),
    **{
        f"plain {dtype} {mode}": linear_call(3, Weight(numbers(8, 33, 256, dtype=dtype)), mode)
        for dtype in gpu.FLOATS
        for mode in ("decode", "prefill")
    },
    **{f"gated_delta T={t}": gated_delta_call(t) for t in ROWS},
    "linear_pair": lambda: kernels.linear_pair(
        numbers(1, 2, 192), packed(1, 70, 192, 4, 64), packed(2, 40, 192, 4, 64), "verify"
    ),
    "delta_inputs": delta_inputs_call(1, mx.bfloat16),
    "delta_inputs f32": delta_inputs_call(3, mx.float32),
    "swiglu_linear": lambda: kernels.swiglu_linear(
        numbers(1, 2, 192), packed(1, 70, 192, 4, 64), packed(2, 70, 192, 4, 64), "verify"
    ),
    "gated_delta bf16": gated_delta_call(3, mx.bfloat16),
    "router of 16": router_call(3, 16, 4),
    "router of 512": router_call(2, 512, 10),
    "router of 40 T=1": router_call(1, 40, 8),
    "route T=1": route_call(1, 40, 8),
    "route of 256": route_call(3, 256, 8),
    "attention of one key": attention_call(1, 0, 64),
    "attention": attention_call(3, 150, 64, gated=False),
    "attention of wide heads": attention_call(1, 70, 256),
    "attention on codes": coded_attention_call(2, 70, 64, 64),
    "attention on codes of wide heads": coded_attention_call(1, 150, 256, 64),
    "attention on codes of narrow heads": coded_attention_call(3, 9, 32, 32),
    "prompt's attention T=1": attention_call(1, 0, 64, mode="prefill"),
    "prompt's attention T=33": attention_call(33, 70, 256, mode="prefill"),
    "prompt's attention of narrow heads": attention_call(9, 3, 32, gated=False, mode="prefill"),
    "prompt's attention on codes": coded_attention_call(5, 70, 64, 64, mode="prefill"),
    "attention_inputs": lambda: mx.concatenate(
        [
            part.reshape(-1)
            for part in kernels.attention_inputs(
                numbers(1, 3, 5, 192), numbers(3, 3, 2, 96), numbers(2, 96), numbers(4, 96), 1e-6, 64, 1e7, 2
            )
        ]
    ),
    "rms_norm": lambda: kernels.rms_norm(numbers(1, 3, 320), numbers(2, 320), 1e-6),
    "add_rms_norm": lambda: kernels.add_rms_norm(numbers(1, 3, 320), numbers(3, 3, 320), numbers(2, 320), 1e-6),
    "gated_rms_norm": lambda: kernels.gated_rms_norm(numbers(1, 3, 5, 64), numbers(2, 3, 5, 64), numbers(3, 64), 1e-6),
    "swiglu": lambda: kernels.swiglu(numbers(1, 3, 200), numbers(2, 3, 200)),
    "sigmoid_scaled": lambda: kernels.sigmoid_scaled(numbers(1, 3, 1), numbers(2, 3, 300)),
    "combine": lambda: kernels.combine(numbers(1, 3, 4, 300), numbers(2, 3, 4)),
}


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch):
    """Launches go to the simulated GPU."""
    monkeypatch.setattr(mx.fast, "metal_kernel", metal_sim.metal_kernel)
    monkeypatch.setattr(gpu, "device_kind", lambda: "metal")
    gpu._compiled.cache_clear()
    with kernels.forced("gpu"):
        yield
    gpu._compiled.cache_clear()


def test_the_first_use_of_a_text_is_timed_and_announced_once(simulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_use, "_seconds", {})
    assert kernels.compile_seconds() is None
    names: list[str] = []
    with kernels.announcing(names.append):
        before, clock = time.perf_counter(), kernels.working_clock()
        CASES["swiglu"]()
        once = kernels.compile_seconds()
        CASES["swiglu"]()
    assert names == ["swiglu"]
    assert once is not None
    assert 0 < once == kernels.compile_seconds()
    assert kernels.working_clock() - clock <= time.perf_counter() - before - once


def arrays(result: Any) -> list[np.ndarray]:
    parts = result if isinstance(result, tuple | list) else [result]
    return [np.array(part.astype(mx.float32) if part.dtype != mx.int32 else part) for part in parts]


@needs_sim
@pytest.mark.parametrize("name", CASES)
def test_kernel_equals_its_reference_in_any_order_of_threads(simulated: None, name: str) -> None:
    got = arrays(CASES[name]())
    with kernels.forced("reference"):
        wanted = arrays(CASES[name]())
    for ours, theirs in zip(got, wanted, strict=True):
        assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()
    for order in ORDERS:
        with metal_sim.options(**order):
            for ours, again in zip(got, arrays(CASES[name]()), strict=True):
                assert ours.tobytes() == again.tobytes()


@needs_sim
@pytest.mark.parametrize("name", [n for n in CASES if "T=" not in n or n.endswith(("T=1", "T=33"))])
def test_kernel_touches_memory_as_it_may_and_wastes_no_line(simulated: None, name: str) -> None:
    with metal_sim.options(diag=True) as runs:
        CASES[name]()
    assert runs
    for run in runs:
        assert run.findings.reports == []
        assert metal_sim.complaints(run.source) == []
        for site in run.findings.sites:
            if site.buffer in WEIGHTS and not site.store:
                assert site.coverage >= 0.9, str(site)


@needs_sim
def test_weight_codes_are_read_in_whole_lines(simulated: None) -> None:
    layout = record_layout(2048, 512, Quantisation(4, 64), Quantisation(4, 64))
    lease = SimpleNamespace(
        records=mx.zeros((1, layout.stride), mx.uint8), slot_of=mx.zeros((1,), mx.int32), outputs=deque(maxlen=1)
    )
    rows, x = mx.zeros((1, 1), mx.int32), numbers(1, 1, 2048)
    with metal_sim.options(diag=True) as runs:
        kernels.expert_ffn(x, lease, rows, mx.ones((1, 1)), layout)
        kernels.linear(x, packed(2, 64, 2048, 4, 64), "decode")
    sites = [s for run in runs for s in run.findings.sites if s.bytes == 16 and s.buffer in ("records", "w")]
    assert len(sites) >= 3
    for site in sites:
        assert site.line_use >= 0.9, str(site)


CUDA_CASES = (
    *("expert_ffn T=1", "expert_contributions", "experts int8", "experts bf16", "expert_ffn_accumulate T=1", "moe"),
    *("int4 decode T=1", "int4 prefill T=1", "int8", f"plain {mx.bfloat16} decode", f"plain {mx.float16} prefill"),
    *(
        "linear_pair",
        "delta_inputs",
        "swiglu_linear",
        "gated_delta T=1",
        "router of 512",
        "router of 40 T=1",
        "route T=1",
        "rms_norm",
    ),
    *("attention_inputs", "attention", "attention on codes"),
    *("prompt's attention T=1", "prompt's attention on codes"),
    *("add_rms_norm", "gated_rms_norm", "swiglu", "sigmoid_scaled", "combine"),
)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[cuda_check.CudaBuild]]:
    """What launches compiled for CUDA."""
    monkeypatch.setattr(mx.fast, "cuda_kernel", cuda_check.cuda_kernel, raising=False)
    monkeypatch.setattr(gpu, "device_kind", lambda: "cuda")
    gpu._compiled.cache_clear()
    with kernels.forced("gpu"), cuda_check.builds() as found:
        yield found
    gpu._compiled.cache_clear()


@needs_nvrtc
def test_texts_compile_for_cuda_with_the_fused_operations_of_the_source(
    built: list[cuda_check.CudaBuild], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in CUDA_CASES:
        CASES[name]()
    monkeypatch.setattr(gpu_linear, "LONG", 0)
    gpu_linear.matvec.cache_clear()
    CASES["int4 decode T=1"]()
    gpu_linear.matvec.cache_clear()
    compiled = {re.match("custom_kernel_ttd_(.*)_[0-9a-f]+", build.name)[1] for build in built}  # type: ignore[index]
    texts = {path.stem for path in (Path(gpu.__file__).parent / "texts").glob("*.metal")}
    assert compiled >= texts - {"simd_width"}
    for build in built:
        assert build.fused == build.fused_in_source, build.name
        # MLX hashes it at every launch.
        assert len(build.text) < 3000, build.name


@needs_sim
def test_fused_experts_equal_their_contributions_combined(simulated: None) -> None:
    layout = record_layout(256, 128, Quantisation(4, 64), Quantisation(4, 64))
    lease, rows, x = make_lease(layout), uneven_rows(4), numbers(1, 4, 256)
    weights = mx.softmax(numbers(2, 4, TOP_K), axis=-1)
    fused = kernels.expert_ffn(x, lease, rows, weights, layout)
    apart = kernels.combine(kernels.expert_contributions(x, lease, rows, layout), weights)
    assert mx.array_equal(fused, apart)


@needs_sim
@pytest.mark.parametrize("mode", ["decode", "verify", "prefill"])
def test_a_row_of_a_product_depends_on_no_other_row_and_no_window(simulated: None, mode: Any) -> None:
    x, w = numbers(1, 33, 192), packed(2, 80, 192, 4, 64)
    whole = kernels.head(x, w, None, mode)
    assert mx.array_equal(kernels.head(x[7:8], w, None, mode), whole[7:8])
    assert mx.array_equal(kernels.head(x, w, (13, 50), mode), whole[:, 13:50])


@needs_sim
@pytest.mark.parametrize(
    "w", [packed(2, 300, 256, 4, 64), packed(2, 300, 2048, 4, 64), Weight(numbers(2, 300, 200, dtype=mx.bfloat16))]
)
def test_the_long_product_equals_the_short_one(simulated: None, monkeypatch: pytest.MonkeyPatch, w: Weight) -> None:
    x = numbers(1, 1, w.weight.shape[1] * (1 if w.mode == "plain" else 32 // w.bits))
    short = kernels.head(x, w, None, "decode")
    monkeypatch.setattr(gpu_linear, "LONG", 1)
    monkeypatch.setattr(gpu_linear, "THREADGROUPS", 1)
    gpu_linear.matvec.cache_clear()
    with metal_sim.options() as runs:
        assert mx.array_equal(kernels.head(x, w, None, "decode"), short)
    gpu_linear.matvec.cache_clear()
    assert "matvec_long" in runs[0].source.name


@needs_sim
def test_products_in_one_launch_equal_one_after_the_other(simulated: None) -> None:
    x, w, v = numbers(1, 3, 192, dtype=mx.bfloat16), packed(2, 72, 192, 4, 64), packed(3, 40, 192, 4, 64)
    for together, w_or_v in zip(kernels.linear_pair(x, w, v, "decode"), (w, v), strict=True):
        assert mx.array_equal(together, kernels.linear(x, w_or_v, "decode"))
    x, mixer = numbers(5, 3, 256, dtype=mx.bfloat16), delta_weights(mx.bfloat16)
    for together, one in zip(kernels.delta_inputs(x, mixer, "decode"), vars(mixer).values(), strict=True):
        assert mx.array_equal(together, kernels.linear(x, one, "decode"))
    x, u = numbers(1, 3, 192, dtype=mx.bfloat16), packed(4, 72, 192, 4, 64)
    apart = kernels.swiglu(kernels.linear(x, w, "decode"), kernels.linear(x, u, "decode"))
    assert mx.array_equal(kernels.swiglu_linear(x, w, u, "decode"), apart)


@needs_sim
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_a_fused_layer_equals_its_operations_one_after_the_other(simulated: None, dtype: mx.Dtype) -> None:
    residual, x, lease, rows, weights, layout, shared = moe_inputs(3, 4, dtype)
    with metal_sim.options() as runs:
        kernels.router(x, Weight(numbers(5, EXPERTS, 256)), TOP_K, "decode")
        fused = kernels.moe(residual, x, lease, rows, weights, layout, shared, "decode")
    assert len(runs) <= 5
    routed = kernels.expert_ffn(x, lease, rows, weights, layout)
    inner = kernels.swiglu_linear(x, shared.gate, shared.up, "decode")
    scale, out = kernels.linear(x, shared.scale, "decode"), kernels.linear(inner, shared.down, "decode")
    assert mx.array_equal(residual + (routed + kernels.sigmoid_scaled(scale, out)).astype(dtype), fused)


@needs_sim
def test_adding_and_norming_in_one_launch_equals_one_after_the_other(simulated: None) -> None:
    x, y, w = numbers(1, 2, 96, dtype=mx.bfloat16), numbers(2, 2, 96, dtype=mx.bfloat16), numbers(3, 96)
    total, normed = kernels.add_rms_norm(x, y, w, 1e-6)
    assert mx.array_equal(total, x + y)
    assert mx.array_equal(normed, kernels.rms_norm(x + y, w, 1e-6))


@needs_sim
def test_accumulating_lease_after_lease_equals_all_at_once(simulated: None) -> None:
    layout = record_layout(256, 128, Quantisation(4, 64), Quantisation(4, 64))
    lease, rows, x = make_lease(layout, absent=0), uneven_rows(9), numbers(1, 9, 256)
    weights, acc = mx.softmax(numbers(2, 9, TOP_K), axis=-1), mx.zeros((9, 256))
    whole = kernels.expert_ffn_accumulate(acc, x, lease, rows, weights, layout)
    table = np.array(lease.slot_of)
    for experts in ((0, 1, 2), (3,), (4, 5)):
        part = np.where(np.isin(np.arange(EXPERTS), experts), table, -1).astype(np.int32)
        wave = SimpleNamespace(records=lease.records, slot_of=mx.array(part), outputs=deque(maxlen=1))
        acc = kernels.expert_ffn_accumulate(acc, x, wave, rows, weights, layout)
    assert mx.array_equal(acc, whole)


@needs_sim
@pytest.mark.parametrize("split", [1, 4, 8])
def test_gated_delta_is_bit_equal_for_every_split(simulated: None, split: int) -> None:
    qkv, a, b, conv, *fixed, state, key_heads = gated_delta_inputs(9)
    whole = kernels.gated_delta(qkv, a, b, conv, *fixed, state, key_heads, "prefill")
    first = kernels.gated_delta(qkv[:split], a[:split], b[:split], conv, *fixed, state, key_heads, "decode")
    later = kernels.gated_delta(
        qkv[split:], a[split:], b[split:], first.conv_state, *fixed, first.state, key_heads, "verify"
    )
    assert mx.array_equal(mx.concatenate([first.out, later.out]), whole.out)
    assert mx.array_equal(later.state, whole.state)
    assert mx.array_equal(later.conv_state, whole.conv_state)


@needs_sim
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("experts", [40, 256])
@pytest.mark.parametrize(("tokens", "width"), [(1, 256), (3, 1152)])
def test_routing_equals_its_operations(
    simulated: None,
    monkeypatch: pytest.MonkeyPatch,
    at_once: bool,
    experts: int,
    tokens: int,
    width: int,
) -> None:
    x, y, norm, eps, w = route_inputs(tokens, experts, width, mx.bfloat16)
    total, normed = kernels.add_rms_norm(x, y, norm, eps)
    apart = (total, normed, *kernels.router(normed, w, 8, "decode"))
    monkeypatch.setattr(gpu_router, "in_one_launch", lambda tokens: at_once)
    with metal_sim.options() as runs:
        for one, same in zip(kernels.route(x, y, norm, eps, w, 8, "decode"), apart, strict=True):
            assert mx.array_equal(one, same)
    assert len(runs) == (1 if at_once else 3)


@needs_nvrtc
@pytest.mark.parametrize("experts", [256, 512])
def test_the_widest_rows_are_routed_with_the_registers_that_a_thread_has(
    built: list[cuda_check.CudaBuild], experts: int
) -> None:
    for width in (gpu_router.WIDEST, 2048):
        kernels.route(*route_inputs(1, experts, width, mx.bfloat16), 10, "decode")
    assert len(built) == 2
    for build in built:
        assert 0 < nvrtc.registers(build.text, build.name) <= 65536 // (32 * gpu_router.SIMDGROUPS)


@needs_sim
@pytest.mark.parametrize("splits", [(1,), (7, 20), (32,)])
@pytest.mark.parametrize("width", [64, 256])
def test_a_prompt_attends_alike_in_any_chunks(simulated: None, splits: tuple[int, ...], width: int) -> None:
    rows, offset = 33, 5
    q, gate = numbers(1, rows, 6, width), numbers(2, rows, 6, width)
    keys, values = (numbers(key, 2, offset + rows + 3, width) for key in (3, 4))
    whole = kernels.attention(q, keys, values, offset, gate, width**-0.5, "prefill")
    for first, last in pairwise((0, *splits, rows)):
        part = kernels.attention(q[first:last], keys, values, offset + first, gate[first:last], width**-0.5, "prefill")
        assert mx.array_equal(part, whole[first:last])


@needs_sim
def test_the_router_breaks_ties_towards_the_lowest_id(simulated: None) -> None:
    w = Weight(mx.concatenate([mx.zeros((3, 64)), mx.ones((4, 64)), mx.zeros((9, 64))]))
    ids, weights = kernels.router(mx.ones((1, 64)), w, 6, "decode")
    assert ids.tolist() == [[0, 1, 3, 4, 5, 6]]
    assert weights[0, 2].item() == weights[0, 5].item()


@needs_sim
@pytest.mark.parametrize("at_once", [False, True], ids=["router", "route"])
@pytest.mark.parametrize(("experts", "k"), [(6, 1), (33, 32), (40, 8), (256, 8)])
@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_logits_that_are_no_numbers_are_routed_like_the_reference(
    simulated: None, monkeypatch: pytest.MonkeyPatch, at_once: bool, experts: int, k: int, odd: float
) -> None:
    monkeypatch.setattr(gpu_router, "in_one_launch", lambda tokens: at_once)
    # All inputs positive, so that a weight that is no number gives the same logit.
    x, y, norm = (mx.abs(numbers(key, *shape)) for key, shape in ((1, (2, 64)), (2, (2, 64)), (3, (64,))))
    for places in ([0], [3], [experts - 1], range(experts)):
        rows = np.array(numbers(5, experts, 64))
        rows[list(places), 0] = odd
        w = Weight(mx.array(rows))
        with metal_sim.options(diag=True) as runs:
            ids, weights = map(np.array, kernels.route(x, y, norm, 1e-6, w, k, "decode")[2:])
        assert [run.findings.reports for run in runs] == [[]] * (1 if at_once else 3)
        with kernels.forced("reference"):
            wanted_ids, wanted = map(np.array, kernels.route(x, y, norm, 1e-6, w, k, "decode")[2:])
        assert np.array_equal(ids, wanted_ids)
        np.testing.assert_allclose(weights, wanted, rtol=1e-5)


@needs_sim
def test_a_convolution_of_one_tap_is_left_to_the_reference(simulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backend.ORDER, "cpu", ("gpu", "reference"))
    qkv, a, b, _, weight, *rest = gated_delta_inputs(3)
    for taps, kind in ((1, "reference"), (2, "gpu")):
        inputs = (qkv, a, b, mx.zeros((taps - 1, qkv.shape[1])), weight[:, :taps], *rest, "prefill")
        with kernels.forced(None):
            got = kernels.gated_delta(*inputs)
        assert kernels.used["gated_delta"] == kind
        with kernels.forced("reference"):
            for ours, theirs in zip(got, kernels.gated_delta(*inputs), strict=True):
                assert mx.allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@needs_sim
@pytest.mark.parametrize("mode", ["decode", "prefill"])
def test_keys_and_values_kept_unlike_are_left_to_the_reference(
    simulated: None, monkeypatch: pytest.MonkeyPatch, mode: Mode
) -> None:
    monkeypatch.setitem(backend.ORDER, "cpu", ("gpu", "reference"))
    q, rows = numbers(1, 1, 4, 128), numbers(3, 2, 9, 128)
    kept = (rows, rows.astype(mx.bfloat16), kernels.quantise_rows(rows, 32), kernels.quantise_rows(rows, 64))
    for keys in kept:
        for values in kept:
            with kernels.forced(None):
                got = kernels.attention(q, keys, values, 5, None, 0.1, mode)
            assert kernels.used["attention"] == ("gpu" if keys is values else "reference")
            with kernels.forced("reference"):
                wanted = kernels.attention(q, keys, values, 5, None, 0.1, mode)
            assert mx.allclose(got, wanted, rtol=1e-5, atol=1e-5)


@needs_sim
def test_a_wrong_dtype_is_named(simulated: None) -> None:
    with pytest.raises(KernelError, match="linear: x is int32, but the GPU kernel takes float32, bfloat16, float16"):
        gpu_linear.multiply(mx.zeros((1, 64), mx.int32), Weight(mx.zeros((8, 64))), mx.float32)


@needs_sim
def test_a_slot_out_of_range_is_found_in_debug_mode(simulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_TTD_DEBUG", "1")
    layout = record_layout(256, 128, Quantisation(4, 64), Quantisation(4, 64))
    lease = make_lease(layout)
    lease.slot_of = mx.full((EXPERTS,), EXPERTS, mx.int32)
    with pytest.raises(KernelError, match="slot 6 of a lease with 6 slots"):
        gpu_experts.check_slots(lease, uneven_rows(2))


@needs_sim
def test_the_simd_width_is_checked(simulated: None, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.require_simd_width()
    monkeypatch.setattr(gpu, "launch", lambda *args: [mx.array([64])])
    with pytest.raises(KernelError, match="SIMD-groups of 64 threads"):
        gpu.require_simd_width()


@needs_sim
def test_the_goldens_for_real_gpus_are_what_the_simulator_gives(simulated: None) -> None:
    digests = {name: check.digest for name, check in gpu_checks.check_kernels().items()}
    assert digests == json.loads(gpu_checks.GOLDENS.read_text())


@needs_sim
@pytest.mark.slow
@pytest.mark.parametrize("routed_at_once", [False, True], ids=["as Metal", "as CUDA"])
def test_the_demo_model_gives_the_same_tokens_resident_and_streamed(
    simulated: None, monkeypatch: pytest.MonkeyPatch, routed_at_once: bool
) -> None:
    monkeypatch.setattr(gpu_router, "in_one_launch", lambda tokens: routed_at_once and tokens == 1)
    monkeypatch.setattr(mx, "compile", lambda function: function)
    monkeypatch.setitem(backend.ORDER, "cpu", ("gpu", "reference"))
    tokens = []
    for resident in (True, False):
        with kernels.forced(None), mlx_ttd.load(DEMO, memory="1GB") as llm:
            if resident:
                for layer in range(len(llm.model.layers)):
                    for _ in llm.provider.waves(layer, np.arange(llm.provider.store.spec.experts)):
                        pass
            with metal_sim.options() as runs:
                tokens.append(llm.generate("In the beginning", max_tokens=4, temperature=0.0).tokens)
            counts = llm.stats().counters
            assert (counts.launches, counts.weight_bytes_copied) == (len(runs), 0)
            assert (llm.provider.whole(0) is not None) == resident
    assert kernels.used["moe"] == "gpu"
    assert tokens[0] == tokens[1]
