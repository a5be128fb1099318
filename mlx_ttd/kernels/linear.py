"""Dense projections and the head from their stored form."""

from __future__ import annotations

import mlx.core as mx

from .backend import Mode, device_kind, register, run
from .weight import Weight
from .work import as_dtype

BLOCK = 256


def _matmul(x: mx.array, w: Weight) -> mx.array:
    if w.mode == "plain":
        return x @ as_dtype(w.weight, x.dtype).T
    scales, biases = w.scales, w.biases
    assert scales is not None
    # MLX's CPU adds packed products up in their own dtype: sums in bfloat16 are off by tenths.
    dtype = mx.float32 if device_kind() == "cpu" else x.dtype
    if biases is not None:
        scales, biases = as_dtype(scales, dtype), as_dtype(biases, dtype)
    return mx.quantized_matmul(
        x.astype(dtype), w.weight, scales, biases, transpose=True, group_size=w.group, bits=w.bits, mode=w.mode
    ).astype(x.dtype)


def _linear(x: mx.array, w: Weight, mode: Mode) -> mx.array:
    # A library matmul's bits depend on its row count, so it only ever sees one row or one full block.
    if mode != "prefill":
        return mx.concatenate([_matmul(x[i : i + 1], w) for i in range(x.shape[0])])
    rows = x.shape[0]
    x = mx.pad(x, [(0, -rows % BLOCK), (0, 0)])
    return mx.concatenate([_matmul(x[i : i + BLOCK], w) for i in range(0, x.shape[0], BLOCK)])[:rows]


def _head(x: mx.array, w: Weight, window: tuple[int, int] | None, mode: Mode) -> mx.array:
    if window is not None:
        w = w.window(*window)
    return _linear(x, w, mode).astype(mx.float32)


def _linear_pair(x: mx.array, w: Weight, v: Weight, mode: Mode) -> tuple[mx.array, mx.array]:
    return linear(x, w, mode), linear(x, v, mode)


def linear(x: mx.array, w: Weight, mode: Mode) -> mx.array:
    """x [T, in] times w [out, in] transposed: [T, out] in x's dtype (f32, bf16 or f16)."""
    return run("linear", x, w, mode)


def linear_pair(x: mx.array, w: Weight, v: Weight, mode: Mode) -> tuple[mx.array, mx.array]:
    """`linear` of x by w and by v, bit for bit; in one launch where a GPU can."""
    return run("linear_pair", x, w, v, mode)


def head(x: mx.array, w: Weight, window: tuple[int, int] | None, mode: Mode) -> mx.array:
    """Logits f32 [T, n] of the vocabulary rows `window` = (start, stop), or of all. x [T, H]."""
    return run("head", x, w, window, mode)


register("linear", "reference", _linear)
register("linear_pair", "reference", _linear_pair)
register("head", "reference", _head)
