"""Routed experts of many rows on a GPU: choices grouped by expert on the device, then multiplied tile by tile."""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import numpy as np

from ..spec import RecordLayout
from .backend import register
from .expert_ffn import Records
from .gpu import FLOATS, SIMD_WIDTH, Template, Text, launch, require_dtype
from .gpu_experts import check_slots, matrix_fits, matrix_values

HEADERS = ("packed_rows.h", "scalar_maths.h", "packed_tile.h")
PLAN = Text("expert_plan", ("x", "rows", "slot_of"), ("order", "tiles"))
GATE_UP = Text("expert_tile_gate_up", ("x", "records", "slot_of", "order", "tiles"), ("act",), HEADERS)
DOWN = Text("expert_tile_down", ("act", "records", "slot_of", "order", "tiles", "window"), ("out",), HEADERS)
ACCUMULATE = Text("expert_accumulate", ("acc", "contributions", "slot_of", "rows", "weights", "window"), ("out",))
TILE = 32
TILE_SIMDGROUPS = 4
SIMDGROUPS = 8
CONTRIBUTION_BYTES = 64_000_000


@cache
def _templates(layout: RecordLayout, choices: int, window: int) -> tuple[Template, Template, Template]:
    shape = {"HIDDEN": layout.hidden, "INTER": layout.inter, "TILE": TILE, "WINDOW": window}
    gate_up = matrix_values(layout.gate_up, layout.stride, choices) | shape
    down = matrix_values(layout.down, layout.stride, choices) | shape
    total = shape | {"CHOICES": choices, "THREADS": SIMDGROUPS * SIMD_WIDTH}
    return tuple(gate_up.items()), tuple(down.items()), tuple(total.items())


@cache
def _window_start(start: int) -> mx.array:
    return mx.array(np.full(8, start, np.int32))


def _window(hidden: int, choices: int) -> int:
    """Channels whose contributions are held at once, so that all of them never are."""
    window = hidden
    while choices * window * 4 > CONTRIBUTION_BYTES and window % 128 == 0:
        window //= 2
    return window


def _accumulate(
    acc: mx.array, x: mx.array, lease: Records, rows: mx.array, weights: mx.array, layout: RecordLayout
) -> mx.array:
    require_dtype("expert_ffn_accumulate", "x", x, *FLOATS)
    require_dtype("expert_ffn_accumulate", "acc", acc, mx.float32)
    require_dtype("expert_ffn_accumulate", "rows", rows, mx.int32)
    check_slots(lease, rows)
    tokens, choices = rows.shape
    experts = lease.slot_of.size
    window = _window(layout.hidden, tokens * choices)
    gate_up, down, total = _templates(layout, choices, window)
    simdgroups = -(-experts // SIMD_WIDTH)
    plan = (("EXPERTS", experts), ("CHOICES", choices), ("TILE", TILE), ("THREADS", simdgroups * SIMD_WIDTH))
    tile_count = tokens * choices // TILE + min(tokens * choices, experts)
    order, tiles = launch(
        PLAN,
        [x, rows, lease.slot_of],
        plan,
        (1, 1, 1),
        simdgroups,
        [((tokens * choices,), mx.int32), ((tile_count, 3), mx.int32)],
    )
    bank = [lease.records, lease.slot_of, order, tiles]
    act = launch(
        GATE_UP,
        [x, *bank],
        gate_up,
        (-(-layout.inter // 32), tile_count, 1),
        TILE_SIMDGROUPS,
        [((tokens * choices, layout.inter), mx.float32)],
    )[0]
    parts = []
    for start in range(0, layout.hidden, window):
        at = _window_start(start)
        contributions = launch(
            DOWN,
            [act, *bank, at],
            down,
            (-(-window // 64), tile_count, 1),
            TILE_SIMDGROUPS,
            [((tokens, choices, window), mx.float32)],
        )[0]
        parts += launch(
            ACCUMULATE,
            [acc, contributions, lease.slot_of, rows, weights, at],
            total,
            (-(-window // (SIMDGROUPS * SIMD_WIDTH)), tokens, 1),
            SIMDGROUPS,
            [((tokens, window), mx.float32)],
        )
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)


def _supports(
    acc: mx.array, x: mx.array, lease: Records, rows: mx.array, weights: mx.array, layout: RecordLayout
) -> bool:
    return matrix_fits(layout.gate_up) and matrix_fits(layout.down) and lease.slot_of.size <= 1024


register("expert_ffn_accumulate", "gpu", _accumulate, _supports)
