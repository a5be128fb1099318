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

    @property
    def weights(self) -> kernels.DeltaMixer:
        return kernels.DeltaMixer(
            self.in_qkv.packed,
            self.in_z.packed,
            self.in_a.packed,
            self.in_b.packed,
            self.out.packed,
            self.conv,
            self.a_log,
            self.dt_bias,
            self.norm,
            self.spec.key_heads,
            self.spec.eps,
        )

    def __call__(self, x: mx.array, state: RecurrentState, mode: Mode) -> mx.array:
        """x [T, H], the tokens that follow `state`, which moves on."""
        mixed = kernels.delta_mixer(x, self.weights, state.conv, state.recurrent, mode)
        state.advance(mixed.conv_state, mixed.state, x.shape[0])
        return mixed.out
