"""The experts' feed-forward on the CPU, by the native extension (csrc/cpu/expert_ffn.h)."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx

from ..spec import Matrix, RecordLayout
from .backend import register
from .expert_ffn import Records
from .native import FLOATS, available, extension


def _part_fits(m: Matrix) -> bool:
    return m.mode == "affine" and m.bits in (4, 8) and m.group in (32, 64, 128)


def experts_fit(x: mx.array, layout: RecordLayout) -> bool:
    return extension() is not None and x.dtype in FLOATS and _part_fits(layout.gate_up) and _part_fits(layout.down)


@cache
def native_layout(layout: RecordLayout) -> Any:
    native: Any = extension()

    def part(m: Matrix) -> Any:
        return native.Part(m.rows, m.cols, m.bits, m.group, m.scale_dtype, m.codes, m.scales, m.biases)

    return native.Layout(part(layout.gate_up), part(layout.down))


def _call(x: mx.array, lease: Records, rows: mx.array, weights: Any, layout: RecordLayout, acc: Any = None) -> mx.array:
    native: Any = extension()
    return native.expert_ffn(x, lease.records, lease.slot_of, rows, weights, native_layout(layout), acc)


def _combine(contributions: mx.array, weights: mx.array) -> mx.array:
    native: Any = extension()
    return native.combine(contributions, weights)


def _contributions(x: mx.array, lease: Records, rows: mx.array, layout: RecordLayout) -> mx.array:
    return _call(x, lease, rows, None, layout)


def _accumulate(
    acc: mx.array, x: mx.array, lease: Records, rows: mx.array, weights: mx.array, layout: RecordLayout
) -> mx.array:
    return _call(x, lease, rows, weights, layout, acc)


register("expert_contributions", "native", _contributions, lambda x, lease, rows, layout: experts_fit(x, layout))
register("combine", "native", _combine, available)
register("expert_ffn", "native", _call, lambda x, lease, rows, weights, layout: experts_fit(x, layout))
register(
    "expert_ffn_accumulate", "native", _accumulate, lambda acc, x, lease, rows, weights, layout: experts_fit(x, layout)
)
