"""A gated DeltaNet mixer: projections, the gated delta rule, the gated norm, and the projection out."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from .backend import Mode, register, run
from .gated_delta import GatedDelta, gated_delta
from .linear import linear, linear_pair
from .norms import gated_rms_norm
from .weight import Weight


class DeltaMixer(NamedTuple):
    """The weights, H columns each but out: qkv [2K+V, H], z [V, H], a and b [nv, H], out [H, V]; vectors f32.

    conv [2K+V, taps]; a_log, dt_bias [nv]; norm [dv]. key_heads heads of K channels; eps is the norm's.
    """

    qkv: Weight
    z: Weight
    a: Weight
    b: Weight
    out: Weight
    conv: mx.array
    a_log: mx.array
    dt_bias: mx.array
    norm: mx.array
    key_heads: int
    eps: float


def _delta_inputs(x: mx.array, w: DeltaMixer, mode: Mode) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    return *linear_pair(x, w.qkv, w.z, mode), *linear_pair(x, w.a, w.b, mode)


def _delta_mixer(x: mx.array, w: DeltaMixer, conv_state: mx.array, state: mx.array, mode: Mode) -> GatedDelta:
    qkv, z, a, b = delta_inputs(x, w, mode)
    mixed = gated_delta(qkv, a, b, conv_state, w.conv, w.a_log, w.dt_bias, state, w.key_heads, mode)
    gated = gated_rms_norm(mixed.out, z.reshape(mixed.out.shape), w.norm, w.eps)
    return GatedDelta(linear(gated.reshape(z.shape), w.out, mode), mixed.conv_state, mixed.state)


def delta_inputs(x: mx.array, w: DeltaMixer, mode: Mode) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """What qkv, z, a and b make of rows x [T, H]: [T, their rows] each, in x's dtype."""
    return run("delta_inputs", x, w, mode)


def delta_mixer(x: mx.array, w: DeltaMixer, conv_state: mx.array, state: mx.array, mode: Mode) -> GatedDelta:
    """out [T, H] in x's dtype of normed rows x [T, H], and conv_state and state (see `gated_delta`) after them."""
    return run("delta_mixer", x, w, conv_state, state, mode)


register("delta_inputs", "reference", _delta_inputs)
register("delta_mixer", "reference", _delta_mixer)
