"""Dense projections and the head on a GPU, from their stored form."""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from .backend import Mode, register
from .gpu import (
    FLOATS,
    SIMD_WIDTH,
    THREADGROUP_BYTES,
    Geometry,
    Text,
    lanes_per_row,
    launch,
    require_dtype,
    staged_bytes,
)
from .weight import Weight

MATVEC = Text("matvec", ("x", "w", "scales", "biases"), ("out",), ("packed_rows.h",))
SIMDGROUPS = 8
CHUNKS_IN_FLIGHT = 4
# Enough threadgroups to fill a large GPU; beyond that each takes more rows and stages x once for all of them.
THREADGROUPS = 1024


@cache
def _matvec(rows: int, cols: int, bits: int, group: int, stored: mx.Dtype, scale: mx.Dtype, out: mx.Dtype) -> Geometry:
    chunks = cols * bits // 128
    lanes = lanes_per_row(chunks)
    tile = SIMDGROUPS * SIMD_WIDTH // lanes
    a_lane = 1
    while 2 * a_lane * chunks // lanes <= CHUNKS_IN_FLIGHT and rows >= 2 * a_lane * tile * THREADGROUPS // 2:
        a_lane *= 2
    tiles = -(-rows // (tile * a_lane))
    repeats = -(-tiles // THREADGROUPS)
    template = (
        ("O", out),
        ("W", stored),
        ("S", scale),
        ("N", rows),
        ("COLS", cols),
        ("BITS", bits),
        ("GROUP", group),
        ("LANES", lanes),
        ("ROWS", a_lane),
        ("TILES", repeats),
        ("SIMDS", SIMDGROUPS),
    )
    return Geometry(-(-tiles // repeats), template)


def multiply(x: mx.array, w: Weight, out: mx.Dtype) -> mx.array:
    """x [T, in] times w [out, in] transposed, [T, out] of type `out`; a row's bits depend on that row alone."""
    require_dtype("linear", "x", x, *FLOATS)
    plain = w.mode == "plain"
    scales, biases = (w.weight, w.weight) if plain else (w.scales, w.biases)
    assert scales is not None
    assert biases is not None
    bits, group = (w.weight.itemsize * 8, 0) if plain else (w.bits, w.group)
    geometry = _matvec(w.rows, x.shape[1], bits, group, w.weight.dtype, scales.dtype, out)
    return launch(
        MATVEC,
        [x, w.weight, scales, biases],
        geometry.template,
        (geometry.threadgroups, x.shape[0], 1),
        SIMDGROUPS,
        [((x.shape[0], w.rows), out)],
    )[0]


def _linear(x: mx.array, w: Weight, mode: Mode) -> mx.array:
    return multiply(x, w, x.dtype)


def _head(x: mx.array, w: Weight, window: tuple[int, int] | None, mode: Mode) -> mx.array:
    return multiply(x, w if window is None else w.window(*window), mx.float32)


def multiply_fits(x: mx.array, w: Weight) -> bool:
    """Whether `multiply` takes these shapes and this format."""
    cols = x.shape[1]
    if staged_bytes(cols) > THREADGROUP_BYTES:
        return False
    if w.mode == "plain":
        return cols % (16 // w.weight.itemsize) == 0
    return w.mode == "affine" and w.bits in (4, 8) and cols % (128 // w.bits) == 0


def _linear_fits(x: mx.array, w: Weight, mode: Mode) -> bool:
    return mode != "prefill" and multiply_fits(x, w)


def _head_fits(x: mx.array, w: Weight, window: tuple[int, int] | None, mode: Mode) -> bool:
    return _linear_fits(x, w, mode)


register("linear", "gpu", _linear, _linear_fits)
register("head", "gpu", _head, _head_fits)
