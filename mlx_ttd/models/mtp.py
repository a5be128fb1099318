"""The multi-token-prediction layer: drafts the token after next from the trunk's hidden state and the next token."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from .. import kernels
from ..kernels import Mode
from ..layers import ResidentWeights
from ..spec import ModelSpec
from ..state import LayerState, new_state
from ..streaming import ExpertProvider
from .decoder_layer import DecoderLayer
from .qwen3_5 import Model


class MTPLayer(nn.Module):
    """Built from `Store.mtp`, with the embedding and head of `trunk`."""

    def __init__(self, spec: ModelSpec, weights: ResidentWeights, provider: ExpertProvider | None, trunk: Model):
        super().__init__()
        self.spec, self.trunk = spec, trunk
        self.fc = weights.linear("fc")
        self.norm_embedding = weights.norm("norm_embedding")
        self.norm_hidden = weights.norm("norm_hidden")
        self.norm = weights.norm("norm")
        self.layer = DecoderLayer(spec, weights, provider, 0)

    def make_cache(self) -> LayerState:
        """An empty state of the one layer."""
        return new_state(self.spec, self.trunk.context, self.trunk.dtype, self.trunk.kv_bits)[0]

    def __call__(self, hidden: mx.array, next_tokens: mx.array, state: LayerState, mode: Mode) -> mx.array:
        """Logits f32 [T, vocab] of the token after next.

        hidden [T, H]: the trunk's rows before its final norm; next_tokens int [T]: the token that follows each.
        """
        eps = self.spec.eps
        embedded = kernels.rms_norm(self.trunk.embed(kernels.to_host(next_tokens)), self.norm_embedding, eps)
        trunk = kernels.rms_norm(kernels.rms_norm(hidden, self.trunk.norm, eps), self.norm_hidden, eps)
        x = self.fc(mx.concatenate([embedded, trunk], axis=-1), mode)
        rows = kernels.rms_norm(self.layer(x, state, mode), self.norm, eps)
        return kernels.head(rows, self.trunk.head.packed, None, mode)
