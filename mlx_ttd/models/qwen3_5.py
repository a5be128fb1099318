"""Qwen3.5 and 3.6, dense and mixture-of-experts: three gated DeltaNet layers to one of gated full attention."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .. import kernels
from ..errors import KernelError
from ..kernels import Mode
from ..layers import ResidentWeights
from ..observe import MODEL, note
from ..spec import ModelSpec
from ..state import BATCHES, LayerState, new_state
from ..streaming import EmbeddingRows, ExpertProvider, require_in_vocabulary
from .decoder_layer import DecoderLayer
from .resident_step import ResidentStep

# A GPU starts on these layers while the host prepares the next.
LAYERS_A_SUBMISSION = 4


class Model(nn.Module):
    """The language model. `model(inputs [1, T], cache=None)` gives logits f32 [1, T, vocab], as mlx-lm expects."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: ResidentWeights,
        provider: ExpertProvider | None,
        embedding: EmbeddingRows | None,
        dtype: mx.Dtype,
        kv_bits: int,
        context: int,
        bf16_products: bool = False,
    ):
        super().__init__()
        self.spec, self.dtype, self.kv_bits, self.context = spec, dtype, kv_bits, context
        self.bf16_products = bf16_products
        self.embedding = embedding
        self.layers = [DecoderLayer(spec, weights, provider, i) for i in range(len(spec.layer_types))]
        self._resident_steps = tuple(ResidentStep(layer) for layer in self.layers)
        if provider is not None and provider.next_layer is not None:
            for layer, following in pairwise(self.layers):
                layer.guess_choice_of(following)
        self.norm = weights.norm("norm")
        self.head = weights.linear("embedding" if spec.tied else "head")

    def make_cache(self) -> list[LayerState]:
        """An empty state for one sequence of at most `context` tokens, which any thread may use."""
        state = new_state(self.spec, self.context, self.dtype, self.kv_bits)
        mx.eval([layer.state for layer in state])
        return state

    def embed(self, tokens: np.ndarray) -> mx.array:
        """Embedding rows [n, H] of int token ids [n]."""
        rows = self._embedding_rows(tokens)
        note(MODEL, "embedding", rows)
        return rows

    def _embedding_rows(self, tokens: np.ndarray) -> mx.array:
        if self.embedding is not None:
            return self.embedding(tokens, self.dtype)
        require_in_vocabulary(tokens.tolist(), self.spec.vocab)
        return self.head.packed.take(kernels.to_device(tokens)).numbers(self.dtype)

    def hidden_states(self, x: mx.array, state: Sequence[LayerState], mode: Mode) -> mx.array:
        """Rows after the last layer, before the final norm: [T, H] from embeddings x [T, H]."""
        with kernels.bf16_products(self.bf16_products):
            for layer, step, layer_state in zip(self.layers, self._resident_steps, state, strict=True):
                moved = step(x, layer_state) if mode == "decode" else None
                x = layer(x, layer_state, mode) if moved is None else moved
                if layer.index % LAYERS_A_SUBMISSION == LAYERS_A_SUBMISSION - 1 and kernels.device_kind() != "cpu":
                    mx.async_eval(x)
        return x

    def logits(self, x: mx.array, mode: Mode, window: tuple[int, int] | None = None) -> mx.array:
        """Logits f32 [T, n] of rows [T, H] from `hidden_states`, for all or a window of the vocabulary."""
        normed = kernels.rms_norm(x, self.norm, self.spec.eps)
        note(MODEL, "final_norm", normed)
        logits = kernels.head(normed, self.head.packed, window, mode)
        note(MODEL, "logits", logits)
        return logits

    def __call__(
        self, inputs: mx.array, cache: Sequence[LayerState] | None = None, mode: Mode | None = None
    ) -> mx.array:
        """Logits of int token ids [1, T]. mode: a single token decodes, more prefill, unless "verify" is asked."""
        if inputs.ndim == 2 and inputs.shape[0] > 1:
            raise KernelError(BATCHES.format(count=inputs.shape[0]))
        if inputs.ndim != 2 or inputs.shape[0] != 1 or inputs.shape[1] == 0:
            raise KernelError(f"inputs have shape {inputs.shape}; pass one sequence of token ids, [1, T].")
        if mode is None:
            mode = "decode" if inputs.shape[1] == 1 else "prefill"
        state = self.make_cache() if cache is None else cache
        hidden = self.hidden_states(self.embed(kernels.to_host(inputs[0])), state, mode)
        return self.logits(hidden, mode)[None]
