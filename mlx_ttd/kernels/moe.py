"""A whole mixture-of-experts step: routed experts, the shared one, and the residual they are added to."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from ..spec import RecordLayout
from .backend import Mode, register, run
from .expert_ffn import Records, expert_ffn
from .gates import sigmoid_scaled, swiglu_linear
from .linear import linear
from .weight import Weight


class SharedExpert(NamedTuple):
    """gate and up [I, H], down [H, I], and scale [1, H], whose sigmoid the expert is multiplied by."""

    gate: Weight
    up: Weight
    down: Weight
    scale: Weight


def _shared_expert(x: mx.array, shared: SharedExpert, mode: Mode) -> mx.array:
    inner = swiglu_linear(x, shared.gate, shared.up, mode)
    return sigmoid_scaled(linear(x, shared.scale, mode), linear(inner, shared.down, mode))


def shared_expert(x: mx.array, shared: SharedExpert, mode: Mode) -> mx.array:
    """sigmoid(scale x) * down(silu(gate x) * up x): f32 [T, H] of x [T, H]."""
    return run("shared_expert", x, shared, mode)


def _moe(
    residual: mx.array,
    x: mx.array,
    lease: Records,
    rows: mx.array,
    weights: mx.array,
    layout: RecordLayout,
    shared: SharedExpert,
    mode: Mode,
) -> mx.array:
    routed = expert_ffn(x, lease, rows, weights, layout)
    return residual + (routed + shared_expert(x, shared, mode)).astype(x.dtype)


def moe(
    residual: mx.array,
    x: mx.array,
    lease: Records,
    rows: mx.array,
    weights: mx.array,
    layout: RecordLayout,
    shared: SharedExpert,
    mode: Mode,
) -> mx.array:
    """residual [T, H] plus, rounded once to x's dtype, the chosen experts of x [T, H] and then the shared one.

    All of them are leased. rows int32 [T, k] ascending, weights f32 [T, k]. Bit for bit what expert_ffn and
    shared_expert give; two launches on a GPU, one call on a CPU. For decode and verify steps.
    """
    return run("moe", residual, x, lease, rows, weights, layout, shared, mode)


register("shared_expert", "reference", _shared_expert)
register("moe", "reference", _moe)
