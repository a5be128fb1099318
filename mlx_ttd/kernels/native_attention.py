"""Causal attention on the CPU, by the native extension (csrc/cpu/attention.h); decode equals prefill bit for bit."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from .backend import Mode, register
from .kept_rows import KeptRows, kept_alike, rows_parts
from .native import FLOATS, extension


def _attention(
    q: mx.array, keys: KeptRows, values: KeptRows, offset: int, gate: mx.array | None, scale: float, mode: Mode
) -> mx.array:
    native: Any = extension()
    return native.attention(q, rows_parts(keys), rows_parts(values), offset, gate, scale)


def _supports(q: mx.array, keys: KeptRows, values: KeptRows, offset: int, gate: mx.array | None, *rest: Any) -> bool:
    numbers = [a for a in (q, keys, values, gate) if isinstance(a, mx.array)]
    return extension() is not None and all(a.dtype in FLOATS for a in numbers) and kept_alike(keys, values)


register("attention", "native", _attention, _supports)
