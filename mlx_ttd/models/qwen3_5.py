"""Qwen3.5 and 3.6, dense and mixture-of-experts: three gated DeltaNet layers to one of gated full attention."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .. import kernels
from ..errors import KernelError
from ..kernels import BLOCK, Mode
from ..layers import GatedAttention, GatedDeltaNet, MoE, ResidentWeights, SwiGLU
from ..observe import MODEL, note
from ..spec import FULL, ModelSpec
from ..state import LayerState, new_state
from ..streaming import EmbeddingRows, ExpertProvider
from .resident_step import ResidentStep

# A GPU starts on these layers while the host prepares the next.
LAYERS_A_SUBMISSION = 4


def blocks(offset: int, rows: int, mark: int) -> list[tuple[int, int]]:
    """Row ranges of a chunk at position `offset`, cut at multiples of BLOCK and at `mark`, both absolute positions."""
    cuts = {0, *range(BLOCK - offset % BLOCK, rows, BLOCK), rows}
    if 0 < mark - offset < rows:
        cuts.add(mark - offset)
    return list(pairwise(sorted(cuts)))


class DecoderLayer(nn.Module):
    def __init__(self, spec: ModelSpec, weights: ResidentWeights, provider: ExpertProvider | None, layer: int):
        super().__init__()
        prefix = f"layers.{layer}."
        self.index, self.eps = layer, spec.eps
        self.input_norm = weights.norm(prefix + "input_norm")
        self.post_norm = weights.norm(prefix + "post_norm")
        self.kind = "attention" if spec.layer_types[layer] == FULL else "gdn"
        if self.kind == "attention":
            self.mixer: nn.Module = GatedAttention(spec, weights, prefix + "attn.")
        else:
            self.mixer = GatedDeltaNet(spec, weights, prefix + "gdn.")
        if provider is None:
            self.mlp: nn.Module = SwiGLU(weights, prefix + "mlp.")
        else:
            self.mlp = MoE(spec, weights, prefix, provider, layer)
        self._resident_step = ResidentStep(self)

    def __call__(self, x: mx.array, state: LayerState, mode: Mode) -> mx.array:
        """x [T, H] in, [T, H] out; `state` moves on by T."""
        if mode == "prefill":
            return self._prefill(x, state)
        if mode == "decode" and (out := self._resident_step(x, state)) is not None:
            return out
        x, inner = self.mix(x, state, mode)
        x = self._feed_forward(x, inner, mode)
        note(self.index, "hidden", x)
        return x

    def mix(self, x: mx.array, state: LayerState, mode: Mode) -> tuple[mx.array, mx.array]:
        """x after the mixer, and its norm for the experts."""
        mixed = self.mixer(self.input_normed(x), state, mode)
        note(self.index, self.kind, mixed)
        return self.add_normed(x, mixed)

    def input_normed(self, x: mx.array) -> mx.array:
        normed = kernels.rms_norm(x, self.input_norm, self.eps)
        note(self.index, "input_norm", normed)
        return normed

    def add_normed(self, x: mx.array, mixed: mx.array) -> tuple[mx.array, mx.array]:
        x, normed = kernels.add_rms_norm(x, mixed, self.post_norm, self.eps)
        note(self.index, "post_norm", normed)
        return x, normed

    def guess_choice_of(self, following: DecoderLayer) -> None:
        """Let this layer's experts guess those of the next: its router, on this layer's rows under its own norm."""
        if not isinstance(self.mlp, MoE) or not isinstance(following.mlp, MoE):
            return
        router, top_k = following.mlp.router.packed, following.mlp.top_k
        scale = mx.where(self.post_norm == 0, 0, following.post_norm / self.post_norm)
        self.mlp.experts.guess_next = lambda x: kernels.router((x * scale).astype(x.dtype), router, top_k, "verify")[0]

    def _feed_forward(self, residual: mx.array, x: mx.array, mode: Mode) -> mx.array:
        if isinstance(self.mlp, MoE):
            return self.mlp(residual, x, mode)
        out = self.mlp(x, mode)
        note(self.index, "mlp", out)
        return residual + out

    def _prefill(self, x: mx.array, state: LayerState) -> mx.array:
        # Only x, the normed rows and the experts' sum span the chunk; everything else lives for one block.
        mode: Mode = "prefill"
        mixed, normed, shared, ids, weights = [], [], [], [], []
        for start, stop in blocks(state.offset, x.shape[0], state.mark_at):
            rows, inner = self.mix(x[start:stop], state, mode)
            if isinstance(self.mlp, MoE):
                chosen, weight = self.mlp.route(inner, mode)
                shared.append(self.mlp.shared_output(inner, mode))
                normed.append(inner)
                ids.append(chosen)
                weights.append(weight)
                mx.eval(rows, state.state, shared[-1], inner, chosen, weight)
            else:
                rows = self._feed_forward(rows, inner, mode)
                mx.eval(rows, state.state)
            mixed.append(rows)
        x = mx.concatenate(mixed)
        if isinstance(self.mlp, MoE):
            rows, chosen, weight = mx.concatenate(normed), mx.concatenate(ids), mx.concatenate(weights)
            x = x + self.mlp.with_experts(rows, chosen, weight, mx.concatenate(shared), mode)
        note(self.index, "hidden", x)
        return x


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
        if provider is not None and provider.next_layer is not None:
            for layer, following in pairwise(self.layers):
                layer.guess_choice_of(following)
        self.norm = weights.norm("norm")
        self.head = weights.linear("embedding" if spec.tied else "head")

    def make_cache(self) -> list[LayerState]:
        """An empty state for one sequence of at most `context` tokens."""
        return new_state(self.spec, self.context, self.dtype, self.kv_bits)

    def embed(self, tokens: np.ndarray) -> mx.array:
        """Embedding rows [n, H] of int token ids [n]."""
        rows = self._embedding_rows(tokens)
        note(MODEL, "embedding", rows)
        return rows

    def _embedding_rows(self, tokens: np.ndarray) -> mx.array:
        if self.embedding is not None:
            return self.embedding(tokens, self.dtype)
        table = self.head.packed
        rows, *found = (a[kernels.to_device(tokens)] for a in table.arrays)
        if table.mode == "plain":
            return rows.astype(self.dtype)
        scales, *biases = (a if a.dtype == mx.uint8 else a.astype(mx.float32) for a in found)
        rows = mx.dequantize(rows, scales, biases[0] if biases else None, table.group, table.bits, table.mode)
        return rows.astype(self.dtype)

    def hidden_states(self, x: mx.array, state: Sequence[LayerState], mode: Mode) -> mx.array:
        """Rows after the last layer, before the final norm: [T, H] from embeddings x [T, H]."""
        with kernels.bf16_products(self.bf16_products):
            for layer, layer_state in zip(self.layers, state, strict=True):
                x = layer(x, layer_state, mode)
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
        if inputs.ndim != 2 or inputs.shape[0] != 1 or inputs.shape[1] == 0:
            raise KernelError(f"inputs have shape {inputs.shape}; pass one sequence of token ids, [1, T].")
        if mode is None:
            mode = "decode" if inputs.shape[1] == 1 else "prefill"
        state = self.make_cache() if cache is None else cache
        hidden = self.hidden_states(self.embed(kernels.to_host(inputs[0])), state, mode)
        return self.logits(hidden, mode)[None]
