"""Attention of single queries, and the norm and RoPE before it, on a GPU. Positions are arrays: graphs outlive them."""

from __future__ import annotations

from functools import cache, lru_cache

import mlx.core as mx
import numpy as np

from .backend import Mode, register
from .gpu import FLOATS, SIMD_WIDTH, Text, constant, launch, require_dtype
from .kept_rows import KeptRows

HEADERS = ("packed_rows.h",)
NORM_ROPE = Text("norm_rope", ("x", "w", "eps", "frequencies", "offset"), ("out",), HEADERS)
KEPT = ("keys", "key_scales", "key_biases", "values", "value_scales", "value_biases")
ATTENTION = Text("attention", ("x", *KEPT, "gate", "offset", "scale"), ("out",), (*HEADERS, "kept_rows.h"))
NORM_SIMDGROUPS = 8
# 256 threads leave each the most registers that an Apple GPU gives one.
SIMDGROUPS = 8
# Head widths of which eight numbers a lane make a power of two lanes.
WIDTHS = (8, 16, 32, 64, 128, 256)


@cache
def _frequencies(dims: int, theta: float) -> mx.array:
    return mx.array((theta ** (-np.arange(0, dims, 2) / dims)).astype(np.float32))


@lru_cache(maxsize=8)
def position(offset: int) -> mx.array:
    """A position as the texts take it, int32 [8]; the layers of a step share one."""
    return mx.array(np.full(8, offset, np.int32))


def _position(offset: int | mx.array) -> mx.array:
    return position(offset) if isinstance(offset, int) else offset


def _norm_rope(x: mx.array, w: mx.array, eps: float, dims: int, theta: float, offset: int | mx.array) -> mx.array:
    require_dtype("norm_rope", "x", x, *FLOATS)
    require_dtype("norm_rope", "w", w, mx.float32)
    rows, heads, width = x.shape
    template = (("T", x.dtype), ("HEADS", heads), ("WIDTH", width), ("DIMS", dims), ("SIMDS", NORM_SIMDGROUPS))
    inputs = [x, w, constant(eps), _frequencies(dims, theta), _position(offset)]
    groups = (-(-rows * heads // NORM_SIMDGROUPS), 1, 1)
    return launch(NORM_ROPE, inputs, template, groups, NORM_SIMDGROUPS, [(x.shape, x.dtype)])[0]


def _attention(
    q: mx.array,
    keys: KeptRows,
    values: KeptRows,
    offset: int | mx.array,
    gate: mx.array | None,
    scale: float,
    mode: Mode,
) -> mx.array:
    require_dtype("attention", "q", q, *FLOATS)
    rows, heads, width = q.shape
    # Plain numbers stand in for the scales that they do not have, which are then not read.
    kept = [part for each in (keys, values) for part in (each if isinstance(each, tuple) else [each] * 3)]
    template = (
        ("T", q.dtype),
        ("HEADS", heads),
        ("KV_HEADS", kept[0].shape[0]),
        ("GROUP", width // kept[1].shape[2] if isinstance(keys, tuple) else 0),
        ("WIDTH", width),
        ("GATED", gate is not None),
        ("SIMDS", SIMDGROUPS),
    )
    inputs = [q, *kept, q if gate is None else gate, _position(offset), constant(scale)]
    return launch(ATTENTION, inputs, template, (heads, rows, 1), SIMDGROUPS, [((rows, heads * width), q.dtype)])[0]


def _attention_fits(q: mx.array, keys: KeptRows, *rest: object) -> bool:
    return rest[-1] != "prefill" and q.shape[2] in WIDTHS


def _rope_fits(x: mx.array, w: mx.array, eps: float, dims: int, theta: float, offset: int | mx.array) -> bool:
    return x.shape[2] % SIMD_WIDTH == 0 and dims % (2 * SIMD_WIDTH) == 0


register("norm_rope", "gpu", _norm_rope, _rope_fits)
register("attention", "gpu", _attention, _attention_fits)
