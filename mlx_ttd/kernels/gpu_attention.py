"""Attention and what comes before it on a GPU. Positions are arrays: graphs outlive them."""

from __future__ import annotations

from functools import cache, lru_cache

import mlx.core as mx
import numpy as np

from .backend import Mode, register
from .gpu import FLOATS, SIMD_WIDTH, Text, constant, launch, require_dtype
from .kept_rows import KeptRows, kept_alike

HEADERS = ("packed_rows.h",)
INPUTS = Text(
    "attention_inputs",
    ("q", "k", "q_norm", "k_norm", "eps", "frequencies", "offset"),
    ("queries", "gates", "keys"),
    HEADERS,
)
KEPT = ("keys", "key_scales", "key_biases", "values", "value_scales", "value_biases")
ARGUMENTS = ("x", *KEPT, "gate", "offset", "scale")
KEPT_HEADERS = (*HEADERS, "scalar_maths.h", "kept_rows.h")
ATTENTION = Text("attention", ARGUMENTS, ("out",), KEPT_HEADERS)
ATTENTION_ROWS = Text("attention_rows", ARGUMENTS, ("out",), KEPT_HEADERS)
NORM_SIMDGROUPS = 8
# 256 threads leave each the most registers that an Apple GPU gives one.
SIMDGROUPS = 8
# Queries of a prompt that share the keys that are read.
QUERIES = 4
# Head widths of which eight numbers a lane make a power of two lanes, at least as many as keys are met at a time.
WIDTHS = (32, 64, 128, 256)


@cache
def _frequencies(dims: int, theta: float) -> mx.array:
    return mx.array((theta ** (-np.arange(0, dims, 2) / dims)).astype(np.float32))


@lru_cache(maxsize=8)
def position(offset: int) -> mx.array:
    """A position as the texts take it, int32 [8]; the layers of a step share one."""
    return mx.array(np.full(8, offset, np.int32))


def _position(offset: int | mx.array) -> mx.array:
    return position(offset) if isinstance(offset, int) else offset


def _inputs(
    q: mx.array,
    k: mx.array,
    q_norm: mx.array,
    k_norm: mx.array,
    eps: float,
    dims: int,
    theta: float,
    offset: int | mx.array,
) -> tuple[mx.array, mx.array, mx.array]:
    require_dtype("attention_inputs", "q", q, *FLOATS)
    require_dtype("attention_inputs", "k", k, q.dtype)
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        require_dtype("attention_inputs", name, norm, mx.float32)
    (rows, heads, _), (_, kv_heads, width) = q.shape, k.shape
    template = (
        ("T", q.dtype),
        ("HEADS", heads),
        ("KV_HEADS", kv_heads),
        ("WIDTH", width),
        ("DIMS", dims),
        ("SIMDS", NORM_SIMDGROUPS),
    )
    inputs = [q, k, q_norm, k_norm, constant(eps), _frequencies(dims, theta), _position(offset)]
    groups = (-(-rows * (heads + kv_heads) // NORM_SIMDGROUPS), 1, 1)
    outputs = [((rows, heads, width), q.dtype), ((rows, heads, width), q.dtype), (k.shape, q.dtype)]
    queries, gates, keys = launch(INPUTS, inputs, template, groups, NORM_SIMDGROUPS, outputs)
    return queries, gates, keys


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
    kv_heads = kept[0].shape[0]
    template = (
        ("T", q.dtype),
        ("HEADS", heads),
        ("KV_HEADS", kv_heads),
        ("GROUP", width // kept[1].shape[2] if isinstance(keys, tuple) else 0),
        ("WIDTH", width),
        ("GATED", gate is not None),
        ("QUERIES", QUERIES),
        ("SIMDS", SIMDGROUPS),
    )
    inputs = [q, *kept, q if gate is None else gate, _position(offset), constant(scale)]
    text, groups = ATTENTION, (heads, rows, 1)
    if mode == "prefill":
        a_group = SIMDGROUPS * (8 * SIMD_WIDTH // width) * QUERIES
        text, groups = ATTENTION_ROWS, (-(-rows * heads // (kv_heads * a_group)), kv_heads, 1)
    return launch(text, inputs, template, groups, SIMDGROUPS, [((rows, heads * width), q.dtype)])[0]


def _attention_fits(q: mx.array, keys: KeptRows, values: KeptRows, *rest: object) -> bool:
    return q.shape[2] in WIDTHS and kept_alike(keys, values)


def _inputs_fit(
    q: mx.array, k: mx.array, q_norm: mx.array, k_norm: mx.array, eps: float, dims: int, *rest: object
) -> bool:
    return k.shape[2] % SIMD_WIDTH == 0 and dims % (2 * SIMD_WIDTH) == 0


register("attention_inputs", "gpu", _inputs, _inputs_fit)
register("attention", "gpu", _attention, _attention_fits)
