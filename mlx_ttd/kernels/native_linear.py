"""Dense projections and the head on the CPU, by the native extension (csrc/cpu/linear.h)."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from .backend import Mode, register
from .native import FLOATS, extension
from .weight import Weight


def fits(x: mx.array, w: Weight) -> bool:
    if extension() is None or x.dtype not in FLOATS:
        return False
    return w.mode == "plain" or (w.mode == "affine" and w.bits in (4, 8) and w.group in (32, 64, 128))


def _linear(x: mx.array, w: Weight, mode: Mode) -> mx.array:
    native: Any = extension()
    return native.linear(x, w.native, prefill=mode == "prefill")


def _linear_pair(x: mx.array, w: Weight, v: Weight, mode: Mode) -> tuple[mx.array, mx.array]:
    native: Any = extension()
    return native.linear_pair(x, w.native, v.native, mode == "prefill")


def _head(x: mx.array, w: Weight, window: tuple[int, int] | None, mode: Mode) -> mx.array:
    native: Any = extension()
    return native.linear(x, w.native, window, True, mode == "prefill")


register("linear", "native", _linear, lambda x, w, mode: fits(x, w))
register("linear_pair", "native", _linear_pair, lambda x, w, v, mode: fits(x, w) and fits(x, v))
register("head", "native", _head, lambda x, w, window, mode: fits(x, w))
