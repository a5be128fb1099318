"""Norms on the CPU, each with what follows it, by the native extension (csrc/cpu/norms.h)."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from .backend import register
from .native import FLOATS, extension


def _rms_norm(x: mx.array, w: mx.array, eps: float) -> mx.array:
    native: Any = extension()
    return native.rms_norm(x, w.astype(mx.float32), eps)


def _gated_rms_norm(x: mx.array, z: mx.array, w: mx.array, eps: float) -> mx.array:
    native: Any = extension()
    return native.rms_norm(x, w.astype(mx.float32), eps, z)


def _norm_rope(x: mx.array, w: mx.array, eps: float, dims: int, theta: float, offset: int) -> mx.array:
    native: Any = extension()
    return native.norm_rope(x, w.astype(mx.float32), eps, dims, theta, offset)


def _fits(*arrays: mx.array) -> bool:
    return extension() is not None and all(a.dtype in FLOATS for a in arrays)


register("rms_norm", "native", _rms_norm, lambda x, w, eps: _fits(x))
register("gated_rms_norm", "native", _gated_rms_norm, lambda x, z, w, eps: _fits(x, z))
register("norm_rope", "native", _norm_rope, lambda x, *rest: _fits(x))
