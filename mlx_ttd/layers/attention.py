"""Full attention with grouped queries, normed heads, partial RoPE and an output gate (Qwen3-Next)."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from .. import kernels
from ..kernels import Mode
from ..spec import ModelSpec
from ..state import KVState
from .weights import ResidentWeights


class GatedAttention(nn.Module):
    def __init__(self, spec: ModelSpec, weights: ResidentWeights, prefix: str):
        super().__init__()
        self.spec = spec
        self.q = weights.linear(prefix + "q")
        self.k = weights.linear(prefix + "k")
        self.v = weights.linear(prefix + "v")
        self.o = weights.linear(prefix + "o")
        self.q_norm = weights.norm(prefix + "q_norm")
        self.k_norm = weights.norm(prefix + "k_norm")

    def __call__(self, x: mx.array, state: KVState, mode: Mode) -> mx.array:
        """x [T, H] at positions state.offset and on; appends to `state`."""
        spec, offset = self.spec, state.offset
        rope = (spec.eps, spec.rope_dim, spec.rope_theta, offset)
        q, gate = mx.split(self.q(x, mode).reshape(-1, spec.heads, 2 * spec.head_dim), 2, axis=-1)
        k = self.k(x, mode).reshape(-1, spec.kv_heads, spec.head_dim)
        v = self.v(x, mode).reshape(-1, spec.kv_heads, spec.head_dim)
        q = kernels.norm_rope(q, self.q_norm, *rope)
        state.append(kernels.norm_rope(k, self.k_norm, *rope), v)
        out = kernels.attention(q, state.keys, state.values, offset, gate, spec.head_dim**-0.5, mode)
        return self.o(out, mode)
