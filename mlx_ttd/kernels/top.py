"""The greatest of many logits, in order."""

from __future__ import annotations

import mlx.core as mx

from .backend import register, run


def _top(logits: mx.array, count: int) -> mx.array:
    size = logits.shape[0]
    if count == 1:
        ids = mx.arange(size, dtype=mx.int32)
        return mx.min(mx.where(logits == mx.max(logits), ids, size), keepdims=True)
    # One integer per token, ordered as (logit, -id): no two are equal, so that no sort has a choice.
    bits = (logits.astype(mx.float32) + 0.0).view(mx.int32)
    ordered = mx.where(bits < 0, bits ^ 0x7FFFFFFF, bits).astype(mx.int64)
    rank = mx.arange(size, dtype=mx.int64) - ordered * (1 << 32)
    if count == size:
        return mx.argsort(rank).astype(mx.int32)
    ids = mx.argpartition(rank, count - 1)[:count]
    return ids[mx.argsort(rank[ids])].astype(mx.int32)


def top(logits: mx.array, count: int) -> mx.array:
    """The ids int32 [count] of the greatest of logits f32 [V], in order, the lower id first of equals.

    count: from 1 to V. No logit may be NaN.
    """
    return run("top", logits, count)


register("top", "reference", _top)
