"""The router on a GPU: logits by the matrix-vector text, whose rows fill the device, then one SIMD-group a token.

CUDA, where the host's part of a launch is what a decode step waits for, takes one launch for a single token together
with the sum and norm before it.
"""

from __future__ import annotations

import mlx.core as mx

from . import gpu
from .backend import Mode, register
from .gpu import FLOATS, SIMD_WIDTH, Template, Text, constant, lanes_per_row, launch, require_dtype
from .gpu_linear import multiply, multiply_fits, stored
from .gpu_norms import SIMDGROUPS as NORM_SIMDGROUPS
from .router import Routed, route_in_steps
from .weight import Weight

CHOOSE = Text("choose", ("logits",), ("ids", "weights"), ("packed_rows.h", "choice.h"))
ROUTE = Text(
    "route",
    ("x", "y", "norm", "eps", "w", "scales", "biases"),
    ("total", "normed", "ids", "weights"),
    ("packed_rows.h", "scalar_maths.h", "row_sum.h", "norm_row.h", "choice.h"),
)
# All that a threadgroup may have.
SIMDGROUPS = 32
# Wider rows take more registers than each of so many threads can have.
WIDEST = 5120


def in_one_launch(tokens: int) -> bool:
    """Whether one threadgroup a token does it all, which leaves most of the device idle."""
    return tokens == 1 and gpu.device_kind() == "cuda"


def _choices(tokens: int, k: int) -> list[tuple[tuple[int, ...], mx.Dtype]]:
    return [((tokens, k), mx.int32), ((tokens, k), mx.float32)]


def _router(x: mx.array, w: Weight, k: int, mode: Mode) -> tuple[mx.array, mx.array]:
    tokens = x.shape[0]
    template: Template = (("EXPERTS", w.rows), ("CHOICES", k))
    logits = multiply(x, w, mx.float32)
    ids, weights = launch(CHOOSE, [logits], template, (tokens, 1, 1), 1, _choices(tokens, k))
    return ids, weights


def _route(x: mx.array, y: mx.array, norm: mx.array, eps: float, w: Weight, k: int, mode: Mode) -> Routed:
    if not in_one_launch(x.shape[0]) or x.shape[1] > WIDEST:
        return route_in_steps(x, y, norm, eps, w, k, mode)
    require_dtype("route", "x", x, *FLOATS)
    require_dtype("route", "y", y, x.dtype)
    require_dtype("route", "norm", norm, mx.float32)
    tokens, cols = x.shape
    arrays, bits, group = stored(w)
    template = (
        ("T", x.dtype),
        ("W", w.weight.dtype),
        ("COLS", cols),
        ("BITS", bits),
        ("GROUP", group),
        ("LANES", lanes_per_row(cols * bits // 128)),
        ("EXPERTS", w.rows),
        ("CHOICES", k),
        ("NORM_SIMDS", NORM_SIMDGROUPS),
        ("SIMDS", SIMDGROUPS),
    )
    outputs = [(x.shape, x.dtype), (x.shape, x.dtype), *_choices(tokens, k)]
    return Routed(*launch(ROUTE, [x, y, norm, constant(eps), *arrays], template, (tokens, 1, 1), SIMDGROUPS, outputs))


def _router_fits(x: mx.array, w: Weight, k: int, mode: Mode) -> bool:
    return k <= min(SIMD_WIDTH, w.rows) and w.rows <= 512 and multiply_fits(x, w)


def _route_fits(x: mx.array, y: mx.array, norm: mx.array, eps: float, w: Weight, k: int, mode: Mode) -> bool:
    return x.shape[1] % 4 == 0 and _router_fits(x, w, k, mode)


register("router", "gpu", _router, _router_fits)
register("route", "gpu", _route, _route_fits)
