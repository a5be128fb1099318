"""Root mean square norms, with the rotary embedding or the output gate that follows them (Zhang & Sennrich 2019)."""

from __future__ import annotations

import mlx.core as mx

from .backend import register, run


def _rms_norm(x: mx.array, w: mx.array, eps: float) -> mx.array:
    return mx.fast.rms_norm(x.astype(mx.float32), w, eps).astype(x.dtype)


def _add_rms_norm(x: mx.array, y: mx.array, w: mx.array, eps: float) -> tuple[mx.array, mx.array]:
    total = x + y
    return total, rms_norm(total, w, eps)


def _gated_rms_norm(x: mx.array, z: mx.array, w: mx.array, eps: float) -> mx.array:
    gate = z.astype(mx.float32)
    return (mx.fast.rms_norm(x.astype(mx.float32), w, eps) * (gate * mx.sigmoid(gate))).astype(z.dtype)


def _norm_rope(x: mx.array, w: mx.array, eps: float, dims: int, theta: float, offset: int | mx.array) -> mx.array:
    normed = mx.fast.rms_norm(x.astype(mx.float32), w, eps).transpose(1, 0, 2)[None]
    offset = offset if isinstance(offset, int) else offset[0]
    rotated = mx.fast.rope(normed, dims, traditional=False, base=theta, scale=1.0, offset=offset)
    return rotated[0].transpose(1, 0, 2).astype(x.dtype)


def rms_norm(x: mx.array, w: mx.array, eps: float) -> mx.array:
    """x [..., n] * rsqrt(mean x^2 + eps) * w, in f32, cast last to x's dtype. w f32 [n], with any 1 + already added."""
    return run("rms_norm", x, w, eps)


def add_rms_norm(x: mx.array, y: mx.array, w: mx.array, eps: float) -> tuple[mx.array, mx.array]:
    """x + y [..., n], of one dtype, and its rms_norm by w."""
    return run("add_rms_norm", x, y, w, eps)


def gated_rms_norm(x: mx.array, z: mx.array, w: mx.array, eps: float) -> mx.array:
    """rms_norm of x [T, heads, n] f32 by w f32 [n], times silu(z [T, heads, n]); in z's dtype."""
    return run("gated_rms_norm", x, z, w, eps)


def norm_rope(x: mx.array, w: mx.array, eps: float, dims: int, theta: float, offset: int | mx.array) -> mx.array:
    """rms_norm of each head of x [T, heads, n], then rotate-half RoPE (Su et al. 2021) of its first `dims` channels.

    Row t stands at position offset + t; an array's first number is the offset. Returns x's shape and dtype.
    """
    return run("norm_rope", x, w, eps, dims, theta, offset)


register("rms_norm", "reference", _rms_norm)
register("add_rms_norm", "reference", _add_rms_norm)
register("gated_rms_norm", "reference", _gated_rms_norm)
register("norm_rope", "reference", _norm_rope)
