"""Causal grouped-query attention with an output gate."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from .backend import Mode, register, run
from .kept_rows import KeptRows, plain
from .norms import norm_rope

# Rows of a prompt that the reference holds the scores of at a time.
ATTENTION_BLOCK = 64


def _attend(q: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | None) -> mx.array:
    """q [rows, nh, hd] over keys [nkv, S, hd]: f32 [rows, nh, hd]."""
    f32 = mx.float32
    out = mx.fast.scaled_dot_product_attention(
        q.astype(f32).transpose(1, 0, 2)[None], keys.astype(f32)[None], values.astype(f32)[None], scale=scale, mask=mask
    )
    return out[0].transpose(1, 0, 2)


def _attention(
    q: mx.array,
    keys: KeptRows,
    values: KeptRows,
    offset: int,
    gate: mx.array | None,
    scale: float,
    mode: Mode,
) -> mx.array:
    rows = q.shape[0]
    keys, values = (plain(kept, offset + rows) for kept in (keys, values))
    pieces = []
    if mode != "prefill":
        for i in range(rows):
            length = offset + i + 1
            pieces.append(_attend(q[i : i + 1], keys[:, :length], values[:, :length], scale, None))
    else:
        # Blocks are aligned to absolute position and see keys up to their own end, so a chunk's width changes no bit.
        for block in range(offset // ATTENTION_BLOCK * ATTENTION_BLOCK, offset + rows, ATTENTION_BLOCK):
            end = block + ATTENTION_BLOCK
            first, last = max(block, offset), min(end, offset + rows)
            padded = mx.pad(q[first - offset : last - offset], [(first - block, end - last), (0, 0), (0, 0)])
            missing = [(0, 0), (0, max(0, end - keys.shape[1])), (0, 0)]
            mask = mx.arange(end)[None, :] <= mx.arange(block, end)[:, None]
            # Rows past the last token have no key of their own yet: they may see anything, and are dropped.
            out = _attend(padded, mx.pad(keys[:, :end], missing), mx.pad(values[:, :end], missing), scale, mask)
            # One block's scores at a time.
            mx.eval(out)
            pieces.append(out[first - block : last - block])
    out = mx.concatenate(pieces)
    if gate is not None:
        out = out * mx.sigmoid(gate.astype(mx.float32))
    return out.reshape(rows, -1).astype(q.dtype)


def _attention_inputs(
    q: mx.array, k: mx.array, q_norm: mx.array, k_norm: mx.array, *rope: Any
) -> tuple[mx.array, mx.array, mx.array]:
    q, gate = mx.split(q, 2, axis=-1)
    return norm_rope(q, q_norm, *rope), gate, norm_rope(k, k_norm, *rope)


def attention_inputs(
    q: mx.array,
    k: mx.array,
    q_norm: mx.array,
    k_norm: mx.array,
    eps: float,
    dims: int,
    theta: float,
    offset: int | mx.array,
) -> tuple[mx.array, mx.array, mx.array]:
    """Queries [T, nh, hd], their gates, and keys [T, nkv, hd], from q [T, nh, 2 hd], each head's query and then its
    gate, and k [T, nkv, hd]. Queries and keys by `norm_rope` with q_norm and k_norm f32 [hd]."""
    return run("attention_inputs", q, k, q_norm, k_norm, eps, dims, theta, offset)


def attention(
    q: mx.array,
    keys: KeptRows,
    values: KeptRows,
    offset: int | mx.array,
    gate: mx.array | None,
    scale: float,
    mode: Mode,
) -> mx.array:
    """softmax(scale q k^T) v with query row i at position offset + i seeing keys [0, offset + i].

    q and gate [T, nh, hd]; keys, values [nkv, S, hd], numbers or 8-bit codes, S >= offset + T, query head h uses key
    head h * nkv // nh. Softmax in f32; the result, times sigmoid(gate), is [T, nh * hd] in q's dtype. For the GPU's
    kernel `offset` may be an array, whose first number counts.
    """
    return run("attention", q, keys, values, offset, gate, scale, mode)


register("attention", "reference", _attention)
register("attention_inputs", "reference", _attention_inputs)
