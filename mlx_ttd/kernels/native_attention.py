"""Causal attention on the CPU, by the native extension (csrc/cpu/attention.h); decode equals prefill bit for bit."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from .backend import Mode, register
from .native import FLOATS, extension


def _attention(
    q: mx.array, keys: mx.array, values: mx.array, offset: int, gate: mx.array | None, scale: float, mode: Mode
) -> mx.array:
    native: Any = extension()
    return native.attention(q, keys, values, offset, gate, scale)


def _supports(q: mx.array, keys: mx.array, values: mx.array, offset: int, gate: mx.array | None, *rest: Any) -> bool:
    arrays = [q, keys, values] if gate is None else [q, keys, values, gate]
    return extension() is not None and all(a.dtype in FLOATS for a in arrays)


register("attention", "native", _attention, _supports)
