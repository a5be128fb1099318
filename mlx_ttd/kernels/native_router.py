"""The router on the CPU in one call, by the native extension (csrc/cpu/router.h)."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from .backend import Mode, register
from .native import extension
from .native_linear import fits
from .weight import Weight


def _router(x: mx.array, w: Weight, k: int, mode: Mode) -> tuple[mx.array, mx.array]:
    native: Any = extension()
    return native.router(x, w.native, k)


register("router", "native", _router, lambda x, w, k, mode: fits(x, w))
