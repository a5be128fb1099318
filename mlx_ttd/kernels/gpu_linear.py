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

INPUTS = ("x", "w", "scales", "biases")
MATVEC = Text("matvec", INPUTS, ("out",), ("packed_rows.h",))
MATVEC_LONG = Text("matvec_long", INPUTS, ("out",), ("packed_rows.h",))
MATMUL = Text("matmul", INPUTS, ("out",), ("packed_rows.h", "packed_tile.h"))
TILE = 32
TILE_SIMDGROUPS = 4
SIMDGROUPS = 8
# Rows of x for which a weight is read once: as many as a verify step may have.
TOKENS = 9
# 16-byte loads that a lane has under way.
CHUNKS_IN_FLIGHT = 4
# So many threadgroups fill a large GPU.
THREADGROUPS = 1056
# Rows for each of their rows at a time from which on threadgroups go round.
LONG = 8


@cache
def matvec(
    single: bool, rows: int, cols: int, bits: int, group: int, stored: mx.Dtype, scale: mx.Dtype, out: mx.Dtype
) -> tuple[Text, Geometry]:
    """The text and its geometry for a matrix [rows, cols] of numbers `stored` as and scaled by such types.

    `single`: for one row of x. Both texts give the same bits.
    """
    chunks = cols * bits // 128
    lanes = lanes_per_row(chunks)
    tile = SIMDGROUPS * SIMD_WIDTH // lanes
    text = MATVEC_LONG if single and rows >= LONG * tile * THREADGROUPS else MATVEC
    steps = 2 if text is MATVEC_LONG else chunks // lanes
    a_lane = 1
    while 2 * a_lane <= min(lanes, CHUNKS_IN_FLIGHT // steps) and rows >= a_lane * tile * THREADGROUPS:
        a_lane *= 2
    template = (
        ("O", out),
        ("W", stored),
        ("S", scale),
        ("COLS", cols),
        ("BITS", bits),
        ("GROUP", group),
        ("LANES", lanes),
        ("ROWS", a_lane),
        ("SIMDS", SIMDGROUPS),
        ("TOKENS", TOKENS),
    )
    tiles = -(-rows // (tile * a_lane))
    return text, Geometry(min(tiles, THREADGROUPS) if text is MATVEC_LONG else tiles, template)


def stored(w: Weight) -> tuple[list[mx.array], int, int]:
    """The arrays that a text takes, and bits and group (0 for plain numbers, whose scales no text reads)."""
    if w.mode == "plain":
        return [w.weight, w.weight, w.weight], w.weight.itemsize * 8, 0
    assert w.scales is not None
    assert w.biases is not None
    return [w.weight, w.scales, w.biases], w.bits, w.group


def multiply(x: mx.array, w: Weight, out: mx.Dtype) -> mx.array:
    """x [T, in] times w [out, in] transposed, [T, out] of type `out`; a row's bits depend on that row alone."""
    require_dtype("linear", "x", x, *FLOATS)
    arrays, bits, group = stored(w)
    tokens = x.shape[0]
    text, geometry = matvec(tokens == 1, w.rows, x.shape[1], bits, group, w.weight.dtype, arrays[1].dtype, out)
    grid = (geometry.threadgroups, -(-tokens // TOKENS), 1)
    return launch(text, [x, *arrays], geometry.template, grid, SIMDGROUPS, [((tokens, w.rows), out)])[0]


def multiply_tiles(x: mx.array, w: Weight, out: mx.Dtype) -> mx.array:
    """As `multiply`, with other bits, for many rows: a weight is read once for TILE of them."""
    require_dtype("linear", "x", x, *FLOATS)
    arrays, bits, group = stored(w)
    template = (
        ("O", out),
        ("W", w.weight.dtype),
        ("COLS", x.shape[1]),
        ("BITS", bits),
        ("GROUP", group),
        ("TILE", TILE),
    )
    grid = (-(-w.rows // 64), -(-x.shape[0] // TILE), 1)
    return launch(MATMUL, [x, *arrays], template, grid, TILE_SIMDGROUPS, [((x.shape[0], w.rows), out)])[0]


def _linear(x: mx.array, w: Weight, mode: Mode) -> mx.array:
    return (multiply_tiles if mode == "prefill" else multiply)(x, w, x.dtype)


def _head(x: mx.array, w: Weight, window: tuple[int, int] | None, mode: Mode) -> mx.array:
    w = w if window is None else w.window(*window)
    return (multiply_tiles if mode == "prefill" else multiply)(x, w, mx.float32)


def _packing_fits(w: Weight) -> bool:
    return w.mode == "plain" or (w.mode == "affine" and w.bits in (4, 8))


def multiply_fits(x: mx.array, w: Weight) -> bool:
    """Whether `multiply` takes these shapes and this format."""
    _, bits, _ = stored(w) if _packing_fits(w) else ([], 0, 0)
    return bits > 0 and x.shape[1] % (128 // bits) == 0 and staged_bytes(x.shape[1]) <= THREADGROUP_BYTES


def _linear_fits(x: mx.array, w: Weight, mode: Mode) -> bool:
    if mode == "prefill":
        return _packing_fits(w) and x.shape[1] % 32 == 0
    return multiply_fits(x, w)


def _head_fits(x: mx.array, w: Weight, window: tuple[int, int] | None, mode: Mode) -> bool:
    return _linear_fits(x, w, mode)


register("linear", "gpu", _linear, _linear_fits)
register("head", "gpu", _head, _head_fits)
