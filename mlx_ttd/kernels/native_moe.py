"""The shared expert, and a whole mixture-of-experts step, on the CPU in one call each (csrc/cpu/moe.h)."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ..spec import RecordLayout
from .backend import Mode, register
from .expert_ffn import Records
from .moe import SharedExpert
from .native import extension
from .native_experts import experts_fit, native_layout
from .native_linear import fits


def _shared_expert(x: mx.array, shared: SharedExpert, mode: Mode) -> mx.array:
    native: Any = extension()
    return native.shared_expert(x, *(w.native for w in shared), mode == "prefill")


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
    native: Any = extension()
    bank = (lease.records, lease.slot_of)
    return native.moe(residual, x, *bank, rows, weights, native_layout(layout), *(w.native for w in shared))


def _shared_fits(x: mx.array, shared: SharedExpert, mode: Mode) -> bool:
    return all(fits(x, w) for w in shared)


def _moe_fits(
    residual: mx.array,
    x: mx.array,
    lease: Records,
    rows: mx.array,
    weights: mx.array,
    layout: RecordLayout,
    shared: SharedExpert,
    mode: Mode,
) -> bool:
    return mode != "prefill" and experts_fit(x, layout) and _shared_fits(x, shared, mode)


register("shared_expert", "native", _shared_expert, _shared_fits)
register("moe", "native", _moe, _moe_fits)
