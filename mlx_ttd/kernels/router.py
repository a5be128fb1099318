"""The choice of experts: f32 logits, softmax over all experts, top-k, renormalised."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from .backend import Mode, register, run
from .linear import linear
from .norms import add_rms_norm
from .weight import Weight


class Routed(NamedTuple):
    """total = x + y and its norm, [T, H] in x's dtype; the norm's ids int32 [T, k] ascending and weights f32 [T, k]."""

    total: mx.array
    normed: mx.array
    ids: mx.array
    weights: mx.array


def _router(x: mx.array, w: Weight, k: int, mode: Mode) -> tuple[mx.array, mx.array]:
    probabilities = mx.softmax(linear(x.astype(mx.float32), w, mode), axis=-1, precise=True)
    # argsort is stable, so equal probabilities keep the lower id first.
    ids = mx.sort(mx.argsort(-probabilities, axis=-1)[:, :k].astype(mx.int32), axis=-1)
    weights = mx.take_along_axis(probabilities, ids, axis=-1)
    total = weights[:, :1]
    for j in range(1, k):
        total = total + weights[:, j : j + 1]
    return ids, weights / total


def route_in_steps(x: mx.array, y: mx.array, norm: mx.array, eps: float, w: Weight, k: int, mode: Mode) -> Routed:
    """`route` as the two operations that it is made of."""
    total, normed = add_rms_norm(x, y, norm, eps)
    return Routed(total, normed, *router(normed, w, k, mode))


def router(x: mx.array, w: Weight, k: int, mode: Mode) -> tuple[mx.array, mx.array]:
    """The k most probable of w's E experts for each row of x [T, H]: ids int32 [T, k] ascending, weights f32 [T, k].

    Ties go to the lowest id. Weights are renormalised over the k chosen by a sum in ascending id.
    """
    return run("router", x, w, k, mode)


def route(x: mx.array, y: mx.array, norm: mx.array, eps: float, w: Weight, k: int, mode: Mode) -> Routed:
    """add_rms_norm of x and y [T, H] by norm f32 [H], and then router: bit for bit those two."""
    return run("route", x, y, norm, eps, w, k, mode)


register("router", "reference", _router)
register("route", "reference", route_in_steps)
