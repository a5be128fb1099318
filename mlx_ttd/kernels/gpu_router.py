"""The router on a GPU: logits by the matrix-vector text, whose rows fill the device, then one SIMD-group a token."""

from __future__ import annotations

import mlx.core as mx

from .backend import Mode, register
from .gpu import SIMD_WIDTH, Text, launch
from .gpu_linear import multiply, multiply_fits
from .weight import Weight

CHOOSE = Text("choose", ("logits",), ("ids", "weights"), ("packed_rows.h",))


def _router(x: mx.array, w: Weight, k: int, mode: Mode) -> tuple[mx.array, mx.array]:
    logits = multiply(x, w, mx.float32)
    shape = (x.shape[0], k)
    template = (("EXPERTS", w.rows), ("CHOICES", k))
    ids, weights = launch(CHOOSE, [logits], template, (x.shape[0], 1, 1), 1, [(shape, mx.int32), (shape, mx.float32)])
    return ids, weights


def _supports(x: mx.array, w: Weight, k: int, mode: Mode) -> bool:
    return k <= min(SIMD_WIDTH, w.rows) and w.rows <= 512 and multiply_fits(x, w)


register("router", "gpu", _router, _supports)
