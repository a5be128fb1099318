"""Gated DeltaNet: linear attention with a recurrent state (Yang et al. 2024)."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from .. import kernels
from ..kernels import Mode
from ..spec import ModelSpec
from ..state import RecurrentState
from .weights import ResidentWeights


class GatedDeltaNet(nn.Module):
    def __init__(self, spec: ModelSpec, weights: ResidentWeights, prefix: str):
        super().__init__()
        self.spec = spec
        self.in_qkv = weights.linear(prefix + "in_qkv")
        self.in_z = weights.linear(prefix + "in_z")
        self.in_a = weights.linear(prefix + "in_a")
        self.in_b = weights.linear(prefix + "in_b")
        self.out = weights.linear(prefix + "out")
        self.conv = weights.vector(prefix + "conv")
        self.a_log = weights.vector(prefix + "a_log")
        self.dt_bias = weights.vector(prefix + "dt_bias")
        self.norm = weights.vector(prefix + "norm")

    def __call__(self, x: mx.array, state: RecurrentState, mode: Mode) -> mx.array:
        """x [T, H], the tokens that follow `state`, which moves on."""
        spec = self.spec
        qkv, z = kernels.linear_pair(x, self.in_qkv.packed, self.in_z.packed, mode)
        a, b = kernels.linear_pair(x, self.in_a.packed, self.in_b.packed, mode)
        mixed = kernels.gated_delta(
            qkv,
            a,
            b,
            state.conv,
            self.conv,
            self.a_log,
            self.dt_bias,
            state.recurrent,
            spec.key_heads,
            mode,
        )
        state.advance(mixed.conv_state, mixed.state, x.shape[0])
        z = z.reshape(-1, spec.value_heads, spec.value_dim)
        return self.out(kernels.gated_rms_norm(mixed.out, z, self.norm, spec.eps).reshape(-1, spec.value_width), mode)
