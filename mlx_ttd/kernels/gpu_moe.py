"""Routed and shared experts on a GPU, with the residual, in two launches."""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from ..spec import RecordLayout
from .backend import Mode, register
from .expert_ffn import DTYPES, Records
from .gpu import (
    FLOATS,
    SIMD_WIDTH,
    THREADGROUP_BYTES,
    Template,
    Text,
    lanes_per_row,
    launch,
    require_dtype,
    staged_bytes,
)
from .gpu_experts import HEADERS, SIMDGROUPS, check_slots, down_geometry, gate_up_geometry, matrix_fits
from .gpu_linear import stored
from .moe import SharedExpert
from .weight import Weight

SHARED_GATE_UP = ("gate_w", "gate_scales", "gate_biases", "up_w", "up_scales", "up_biases")
SHARED_DOWN = ("down_w", "down_scales", "down_biases", "scale_w")
GATE_UP = Text("moe_gate_up", ("x", "records", "slot_of", "rows", *SHARED_GATE_UP), ("act",), HEADERS)
DOWN = Text(
    "moe_down", ("act", "records", "slot_of", "rows", "weights", "x", "residual", *SHARED_DOWN), ("out",), HEADERS
)


@cache
def _down_template(layout: RecordLayout, choices: int, dtype: mx.Dtype, scale: mx.Dtype) -> Template:
    lanes = lanes_per_row(layout.hidden * scale.size // 16)
    return (*down_geometry(layout, choices, False).template, ("T", dtype), ("G", scale), ("SCALE_LANES", lanes))


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
    require_dtype("moe", "x", x, *FLOATS)
    require_dtype("moe", "residual", residual, x.dtype)
    require_dtype("moe", "rows", rows, mx.int32)
    check_slots(lease, rows)
    tokens, choices = rows.shape
    first, second = gate_up_geometry(layout, choices), down_geometry(layout, choices, False)
    bank = [lease.records, lease.slot_of, rows]
    act = launch(
        GATE_UP,
        [x, *bank, *stored(shared.gate)[0], *stored(shared.up)[0]],
        (*first.template, ("T", x.dtype)),
        (first.threadgroups, tokens * (choices + 1), 1),
        SIMDGROUPS,
        [((tokens * (choices + 1), layout.inter), mx.float32)],
    )[0]
    return launch(
        DOWN,
        [act, *bank, weights, x, residual, *stored(shared.down)[0], shared.scale.weight],
        _down_template(layout, choices, x.dtype, shared.scale.weight.dtype),
        (second.threadgroups, tokens, 1),
        choices + 2,
        [(x.shape, x.dtype)],
    )[0]


def _packed_as(w: Weight, rows: int, bits: int, group: int, scale_dtype: str) -> bool:
    scales = w.scales is not None and w.scales.dtype == DTYPES[scale_dtype]
    return scales and (w.mode, w.rows, w.bits, w.group) == ("affine", rows, bits, group)


def _supports(
    residual: mx.array,
    x: mx.array,
    lease: Records,
    rows: mx.array,
    weights: mx.array,
    layout: RecordLayout,
    shared: SharedExpert,
    mode: Mode,
) -> bool:
    up, down = layout.gate_up, layout.down
    if mode == "prefill" or not (matrix_fits(up) and matrix_fits(down)) or rows.shape[1] + 2 > SIMD_WIDTH:
        return False
    return (
        all(_packed_as(w, layout.inter, up.bits, up.group, up.scale_dtype) for w in (shared.gate, shared.up))
        and _packed_as(shared.down, layout.hidden, down.bits, down.group, down.scale_dtype)
        and shared.scale.mode == "plain"
        and layout.hidden * shared.scale.weight.itemsize % 16 == 0
        and staged_bytes(layout.hidden) <= THREADGROUP_BYTES
    )


register("moe", "gpu", _moe, _supports)
