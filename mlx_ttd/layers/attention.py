"""Full attention with grouped queries, normed heads, partial RoPE and an output gate (Qwen3-Next)."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from .. import kernels
from ..kernels import KeptRows, Mode
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
        offset = state.offset
        q, gate, k, v = self.project(x, offset, mode)
        state.append(k, v)
        return self.attend(q, gate, state.keys, state.values, offset, mode)

    def project(self, x: mx.array, offset: int | mx.array, mode: Mode) -> tuple[mx.array, ...]:
        """Queries and their gate [T, heads, head_dim], keys and values [T, kv_heads, head_dim] of x at `offset`."""
        spec = self.spec
        q = self.q(x, mode).reshape(-1, spec.heads, 2 * spec.head_dim)
        pair = kernels.linear_pair(x, self.k.packed, self.v.packed, mode)
        k, v = (rows.reshape(-1, spec.kv_heads, spec.head_dim) for rows in pair)
        rope = (spec.eps, spec.rope_dim, spec.rope_theta, offset)
        return (*kernels.attention_inputs(q, k, self.q_norm, self.k_norm, *rope), v)

    def attend(
        self, q: mx.array, gate: mx.array, keys: KeptRows, values: KeptRows, offset: int | mx.array, mode: Mode
    ) -> mx.array:
        """What comes out of the mixer, [T, H]."""
        return self.o(kernels.attention(q, keys, values, offset, gate, self.spec.head_dim**-0.5, mode), mode)
