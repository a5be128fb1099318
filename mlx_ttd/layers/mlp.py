"""SwiGLU feed-forward: the shared expert, and the MLP of dense models (Shazeer 2020)."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from .. import kernels
from ..kernels import Mode
from .weights import ResidentWeights


class SwiGLU(nn.Module):
    def __init__(self, weights: ResidentWeights, prefix: str):
        super().__init__()
        self.gate = weights.linear(prefix + "gate")
        self.up = weights.linear(prefix + "up")
        self.down = weights.linear(prefix + "down")

    def __call__(self, x: mx.array, mode: Mode) -> mx.array:
        return self.down(kernels.swiglu_linear(x, self.gate.packed, self.up.packed, mode), mode)
