"""Routed experts on a GPU: two launches a layer, gate and up with SwiGLU, then down with the weighted sum."""

from __future__ import annotations

import os
from functools import cache

import mlx.core as mx

from ..errors import KernelError
from ..spec import Matrix, RecordLayout
from .backend import register
from .expert_ffn import DTYPES, Records
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

HEADERS = ("packed_rows.h", "scalar_maths.h", "expert_rows.h")
GATE_UP = Text("expert_gate_up", ("x", "records", "slot_of", "rows"), ("act",), HEADERS)
COMBINE = Text("combine", ("contributions", "weights"), ("out",))
DOWN = Text("expert_down", ("act", "records", "slot_of", "rows", "weights"), ("out",), HEADERS)
SIMDGROUPS = 8
PAIRS = 1
# 16-byte loads that a lane has under way in the down product.
DOWN_CHUNKS = 4


def matrix_values(matrix: Matrix, stride: int, choices: int) -> dict[str, int | bool | mx.Dtype]:
    """Template values that say how and where `matrix` lies in a record of `stride` bytes."""
    return {
        "S": DTYPES[matrix.scale_dtype],
        "BITS": matrix.bits,
        "GROUP": matrix.group,
        "LANES": lanes_per_row(matrix.words // 4),
        "SIMDS": SIMDGROUPS,
        "CHOICES": choices,
        "STRIDE": stride,
        "CODES": matrix.codes,
        "SCALES": matrix.scales,
        "BIASES": matrix.biases or 0,
    }


@cache
def gate_up_geometry(layout: RecordLayout, choices: int) -> Geometry:
    """Of the launch that multiplies by gate and up."""
    values = matrix_values(layout.gate_up, layout.stride, choices)
    values |= {"HIDDEN": layout.hidden, "INTER": layout.inter, "PAIRS": PAIRS, "DOWN_BITS": layout.down.bits}
    rows = SIMDGROUPS * PAIRS * SIMD_WIDTH // lanes_per_row(layout.gate_up.words // 4)
    return Geometry(-(-layout.inter // rows), tuple(values.items()))


@cache
def down_geometry(layout: RecordLayout, choices: int, apart: bool) -> Geometry:
    """Of the launch that multiplies by down, and keeps the choices apart or sums them."""
    chunks = layout.down.words // 4
    lanes = lanes_per_row(chunks)
    a_lane = max(1, DOWN_CHUNKS * lanes // chunks)
    values = matrix_values(layout.down, layout.stride, choices)
    values |= {"HIDDEN": layout.hidden, "INTER": layout.inter, "ROWS": a_lane, "CONTRIBUTIONS": apart}
    return Geometry(-(-layout.hidden // (a_lane * SIMD_WIDTH // lanes)), tuple(values.items()))


def check_slots(lease: Records, rows: mx.array) -> None:
    """Where MLX_TTD_DEBUG is set: KernelError if a choice's slot is not one of the lease's. Waits for the device."""
    if not os.environ.get("MLX_TTD_DEBUG"):
        return
    highest, slots = int(mx.max(lease.slot_of[rows]).item()), lease.records.shape[0]  # type: ignore[arg-type]
    if highest >= slots:
        raise KernelError(f"expert_ffn: slot {highest} of a lease with {slots} slots; its slot_of is wrong.")


def _run(x: mx.array, lease: Records, rows: mx.array, layout: RecordLayout, weights: mx.array | None) -> mx.array:
    require_dtype("expert_ffn", "x", x, *FLOATS)
    require_dtype("expert_ffn", "rows", rows, mx.int32)
    require_dtype("expert_ffn", "slot_of", lease.slot_of, mx.int32)
    check_slots(lease, rows)
    tokens, choices = rows.shape
    first, second = gate_up_geometry(layout, choices), down_geometry(layout, choices, weights is None)
    act = launch(
        GATE_UP,
        [x, lease.records, lease.slot_of, rows],
        first.template,
        (first.threadgroups, tokens * choices, 1),
        SIMDGROUPS,
        [((tokens * choices, layout.inter), mx.float32)],
    )[0]
    shape = (tokens, layout.hidden) if weights is not None else (tokens, choices, layout.hidden)
    # Contributions are unweighted: the text does not read `weights` then.
    weights = act if weights is None else weights
    return launch(
        DOWN,
        [act, lease.records, lease.slot_of, rows, weights],
        second.template,
        (second.threadgroups, tokens, 1),
        choices,
        [(shape, mx.float32)],
    )[0]


def _contributions(x: mx.array, lease: Records, rows: mx.array, layout: RecordLayout) -> mx.array:
    return _run(x, lease, rows, layout, None)


def _ffn(x: mx.array, lease: Records, rows: mx.array, weights: mx.array, layout: RecordLayout) -> mx.array:
    require_dtype("expert_ffn", "weights", weights, mx.float32)
    return _run(x, lease, rows, layout, weights)


def _combine(contributions: mx.array, weights: mx.array) -> mx.array:
    tokens, choices, hidden = contributions.shape
    template = (("CHOICES", choices), ("HIDDEN", hidden), ("THREADS", SIMDGROUPS * SIMD_WIDTH))
    tiles = -(-hidden // (SIMDGROUPS * SIMD_WIDTH))
    return launch(
        COMBINE, [contributions, weights], template, (tiles, tokens, 1), SIMDGROUPS, [((tokens, hidden), mx.float32)]
    )[0]


def matrix_fits(matrix: Matrix) -> bool:
    """Whether the texts read this packing."""
    return matrix.mode == "affine" and matrix.bits in (4, 8) and matrix.group >= 128 // matrix.bits


def _supports(x: mx.array, lease: Records, rows: mx.array, *rest: object) -> bool:
    layout = rest[-1]
    assert isinstance(layout, RecordLayout)
    packed = matrix_fits(layout.gate_up) and matrix_fits(layout.down)
    return packed and rows.shape[1] <= SIMD_WIDTH and staged_bytes(layout.hidden) <= THREADGROUP_BYTES


register("expert_contributions", "gpu", _contributions, _supports)
register("combine", "gpu", _combine)
register("expert_ffn", "gpu", _ffn, _supports)
