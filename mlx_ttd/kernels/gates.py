"""Products with a gate: SwiGLU (Shazeer 2020), and the sigmoid that scales the shared expert."""

from __future__ import annotations

import mlx.core as mx

from .backend import Mode, register, run
from .linear import linear_pair
from .weight import Weight


def _swiglu(gate: mx.array, up: mx.array) -> mx.array:
    return gate * mx.sigmoid(gate) * up


def _sigmoid_scaled(scale: mx.array, x: mx.array) -> mx.array:
    return mx.sigmoid(scale.astype(mx.float32)) * x.astype(mx.float32)


def _swiglu_linear(x: mx.array, gate: Weight, up: Weight, mode: Mode) -> mx.array:
    return swiglu(*linear_pair(x, gate, up, mode))


def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """silu(gate) * up, both [T, n], in their dtype."""
    return run("swiglu", gate, up)


def swiglu_linear(x: mx.array, gate: Weight, up: Weight, mode: Mode) -> mx.array:
    """`swiglu` of x [T, in] times gate [n, in] and times up [n, in], bit for bit; in one launch where a GPU can."""
    return run("swiglu_linear", x, gate, up, mode)


def sigmoid_scaled(scale: mx.array, x: mx.array) -> mx.array:
    """sigmoid(scale [T, 1]) * x [T, H], f32."""
    return run("sigmoid_scaled", scale, x)


register("swiglu", "reference", _swiglu)
register("swiglu_linear", "reference", _swiglu_linear)
register("sigmoid_scaled", "reference", _sigmoid_scaled)
