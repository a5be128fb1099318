"""Several dense projections of the same rows in one launch, on a GPU."""

from __future__ import annotations

import mlx.core as mx

from .backend import Mode, register
from .delta_mixer import DeltaMixer
from .gpu import FLOATS, SIMD_WIDTH, Template, Text, lanes_per_row, launch, require_dtype
from .gpu_linear import SIMDGROUPS, TOKENS, multiply_fits, stored
from .weight import Weight

INPUTS = ("x", "w", "w_scales", "w_biases", "v", "v_scales", "v_biases")
TWO = Text("matvec_two", INPUTS, ("w_out", "v_out"), ("packed_rows.h", "row_pair.h"))
DELTA = Text(
    "delta_inputs", (*INPUTS, "a_w", "b_w"), ("w_out", "v_out", "a_out", "b_out"), ("packed_rows.h", "row_pair.h")
)
SWIGLU = Text("matvec_swiglu", INPUTS, ("out",), ("packed_rows.h", "scalar_maths.h"))


def _prepare(x: mx.array, w: Weight, v: Weight) -> tuple[list[mx.array], Template, int]:
    """Inputs, template values, and the rows that a threadgroup takes."""
    require_dtype("linear", "x", x, *FLOATS)
    arrays, bits, group = stored(w)
    lanes = lanes_per_row(x.shape[1] * bits // 128)
    template = (
        ("O", x.dtype),
        ("W", w.weight.dtype),
        ("COLS", x.shape[1]),
        ("BITS", bits),
        ("GROUP", group),
        ("LANES", lanes),
        ("SIMDS", SIMDGROUPS),
        ("TOKENS", TOKENS),
    )
    return [x, *arrays, *stored(v)[0]], template, SIMDGROUPS * SIMD_WIDTH // lanes


def _linear_pair(x: mx.array, w: Weight, v: Weight, mode: Mode) -> tuple[mx.array, mx.array]:
    inputs, template, tile = _prepare(x, w, v)
    rows = x.shape[0]
    outputs = [((rows, w.rows), x.dtype), ((rows, v.rows), x.dtype)]
    grid = (-(-(w.rows + v.rows) // tile), -(-rows // TOKENS), 1)
    first, second = launch(TWO, inputs, template, grid, SIMDGROUPS, outputs)
    return first, second


def _delta_inputs(x: mx.array, w: DeltaMixer, mode: Mode) -> tuple[mx.array, ...]:
    inputs, template, tile = _prepare(x, w.qkv, w.z)
    rows, plain = x.shape[0], w.a.weight
    lanes = lanes_per_row(x.shape[1] * plain.itemsize // 16)
    tiles = -(-(w.qkv.rows + w.z.rows) // tile) + -(-(w.a.rows + w.b.rows) * lanes // (SIMDGROUPS * SIMD_WIDTH))
    template = (*template, ("A", plain.dtype), ("PLAIN_LANES", lanes))
    outputs = [((rows, m.rows), x.dtype) for m in (w.qkv, w.z, w.a, w.b)]
    grid = (tiles, -(-rows // TOKENS), 1)
    return tuple(launch(DELTA, [*inputs, plain, w.b.weight], template, grid, SIMDGROUPS, outputs))


def _swiglu_linear(x: mx.array, gate: Weight, up: Weight, mode: Mode) -> mx.array:
    inputs, template, tile = _prepare(x, gate, up)
    rows = x.shape[0]
    grid = (-(-gate.rows // tile), -(-rows // TOKENS), 1)
    return launch(SWIGLU, inputs, template, grid, SIMDGROUPS, [((rows, gate.rows), x.dtype)])[0]


def _fits(x: mx.array, w: Weight, v: Weight, mode: Mode) -> bool:
    one_packing = (w.mode, w.bits, w.group, [a.dtype for a in w.arrays]) == (
        v.mode,
        v.bits,
        v.group,
        [a.dtype for a in v.arrays],
    )
    return mode != "prefill" and one_packing and multiply_fits(x, w)


def _delta_fits(x: mx.array, w: DeltaMixer, mode: Mode) -> bool:
    return w.a.mode == "plain" and _fits(x, w.qkv, w.z, mode) and _fits(x, w.a, w.b, mode)


register("delta_inputs", "gpu", _delta_inputs, _delta_fits)
register("linear_pair", "gpu", _linear_pair, _fits)
register("swiglu_linear", "gpu", _swiglu_linear, _fits)
