"""Causal attention on the CPU, by the native extension (csrc/cpu/attention.h); decode equals prefill bit for bit."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from .backend import Mode, register
from .kept_rows import KeptRows, rows_parts
from .native import FLOATS, extension


def _attention(
    q: mx.array, keys: KeptRows, values: KeptRows, offset: int, gate: mx.array | None, scale: float, mode: Mode
) -> mx.array:
    native: Any = extension()
    return native.attention(q, rows_parts(keys), rows_parts(values), offset, gate, scale)


def _supports(q: mx.array, keys: KeptRows, values: KeptRows, offset: int, gate: mx.array | None, *rest: Any) -> bool:
    numbers = [a for a in (q, keys, values, gate) if isinstance(a, mx.array)]
    forms = [[(part.dtype, part.shape) for part in rows_parts(rows)] for rows in (keys, values)]
    return extension() is not None and all(a.dtype in FLOATS for a in numbers) and forms[0] == forms[1]


register("attention", "native", _attention, _supports)
