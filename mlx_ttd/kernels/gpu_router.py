"""The router on a GPU: logits by the matrix-vector text, whose rows fill the device, then one SIMD-group a token.

CUDA, where the host's part of a launch is what a decode step waits for, takes one launch for a single token.
"""

from __future__ import annotations

import mlx.core as mx

from . import gpu
from .backend import Mode, register
from .gpu import FLOATS, SIMD_WIDTH, Text, lanes_per_row, launch, require_dtype
from .gpu_linear import multiply, multiply_fits, stored
from .weight import Weight

HEADERS = ("packed_rows.h", "choice.h")
CHOOSE = Text("choose", ("logits",), ("ids", "weights"), HEADERS)
ROUTER = Text("router", ("x", "w", "scales", "biases"), ("ids", "weights"), HEADERS)
# All that a threadgroup may have.
SIMDGROUPS = 32


def in_one_launch(tokens: int) -> bool:
    """Whether one threadgroup a token does it all, which leaves most of the device idle."""
    return tokens == 1 and gpu.device_kind() == "cuda"


def _router(x: mx.array, w: Weight, k: int, mode: Mode) -> tuple[mx.array, mx.array]:
    tokens, cols = x.shape
    template: gpu.Template = (("EXPERTS", w.rows), ("CHOICES", k))
    outputs = [((tokens, k), mx.int32), ((tokens, k), mx.float32)]
    if in_one_launch(tokens):
        require_dtype("router", "x", x, *FLOATS)
        arrays, bits, group = stored(w)
        inputs, text, simdgroups = [x, *arrays], ROUTER, SIMDGROUPS
        packing = (
            ("W", w.weight.dtype),
            ("BITS", bits),
            ("GROUP", group),
            ("LANES", lanes_per_row(cols * bits // 128)),
        )
        template = (*template, *packing, ("COLS", cols), ("SIMDS", SIMDGROUPS))
    else:
        inputs, text, simdgroups = [multiply(x, w, mx.float32)], CHOOSE, 1
    ids, weights = launch(text, inputs, template, (tokens, 1, 1), simdgroups, outputs)
    return ids, weights


def _supports(x: mx.array, w: Weight, k: int, mode: Mode) -> bool:
    return k <= min(SIMD_WIDTH, w.rows) and w.rows <= 512 and multiply_fits(x, w)


register("router", "gpu", _router, _supports)
