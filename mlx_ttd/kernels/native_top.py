"""The greatest logits on the CPU, by the native extension (csrc/cpu/top.h)."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from .backend import register
from .native import extension

# More are sorted whole.
MOST = 1024


def _top(logits: mx.array, count: int) -> mx.array:
    native: Any = extension()
    return native.top(logits, count)


register(
    "top",
    "native",
    _top,
    lambda logits, count: extension() is not None and logits.dtype == mx.float32 and count <= MOST,
)
