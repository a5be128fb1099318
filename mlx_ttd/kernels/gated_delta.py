"""Gated delta rule with its causal convolution (Yang et al. 2024, "Gated Delta Networks"), token by token."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from .backend import Mode, register, run


class GatedDelta(NamedTuple):
    out: mx.array
    conv_state: mx.array
    state: mx.array


def _l2_normalised(x: mx.array) -> mx.array:
    return x * mx.rsqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6)


def _convolve(inputs: mx.array, weight: mx.array) -> mx.array:
    taps = weight.shape[1]
    rows = inputs.shape[0] - taps + 1
    total = inputs[:rows] * weight[:, 0]
    for j in range(1, taps):
        total = total + inputs[j : j + rows] * weight[:, j]
    return total * mx.sigmoid(total)


def _gated_delta(
    qkv: mx.array,
    a: mx.array,
    b: mx.array,
    conv_state: mx.array,
    conv_weight: mx.array,
    a_log: mx.array,
    dt_bias: mx.array,
    state: mx.array,
    key_heads: int,
    mode: Mode,
) -> GatedDelta:
    f32 = mx.float32
    value_heads, value_dim, key_dim = state.shape
    inputs = mx.concatenate([conv_state, qkv.astype(conv_state.dtype)])
    mixed = _convolve(inputs.astype(f32), conv_weight.astype(f32))
    width = key_heads * key_dim
    q, k, v = mx.split(mixed, [width, 2 * width], axis=-1)
    repeats = value_heads // key_heads
    q, k = (mx.repeat(_l2_normalised(p.reshape(-1, key_heads, key_dim)), repeats, axis=1) for p in (q, k))
    q = q * key_dim**-0.5
    v = v.reshape(-1, value_heads, value_dim)
    step = a.astype(f32) + dt_bias.astype(f32)
    decay = mx.exp(-mx.exp(a_log.astype(f32)) * mx.logaddexp(step, 0.0))
    beta = mx.sigmoid(b.astype(f32))
    out = []
    for t in range(qkv.shape[0]):
        state = state * decay[t][:, None, None]
        delta = (v[t] - (state * k[t][:, None, :]).sum(axis=-1)) * beta[t][:, None]
        state = state + delta[:, :, None] * k[t][:, None, :]
        out.append((state * q[t][:, None, :]).sum(axis=-1))
    return GatedDelta(mx.stack(out), mx.contiguous(inputs[inputs.shape[0] - conv_state.shape[0] :]), state)


def gated_delta(
    qkv: mx.array,
    a: mx.array,
    b: mx.array,
    conv_state: mx.array,
    conv_weight: mx.array,
    a_log: mx.array,
    dt_bias: mx.array,
    state: mx.array,
    key_heads: int,
    mode: Mode,
) -> GatedDelta:
    """Convolution, SiLU, gates, l2 norm and recurrence for T tokens, one after the other.

    qkv [T, 2K+V] raw projections, channels q | k | v; a, b [T, nv]; conv_state [taps - 1, 2K+V], the last raw inputs;
    conv_weight [2K+V, taps]; a_log, dt_bias [nv]; state f32 [nv, dv, dk]. Value head h uses key head h * nk // nv.
    Per token: S *= exp(-exp(a_log) softplus(a + dt_bias)); d = (v - S k) sigmoid(b); S += d k^T; o = S q.
    Returns out f32 [T, nv, dv], and conv_state and state after the last token. Bits do not depend on the split of T.
    """
    return run("gated_delta", qkv, a, b, conv_state, conv_weight, a_log, dt_bias, state, key_heads, mode)


register("gated_delta", "reference", _gated_delta)
