"""A layer of Qwen3.5 and 3.6: a mixer, gated DeltaNet or gated full attention, then experts or one feed-forward."""

from __future__ import annotations

from itertools import pairwise

import mlx.core as mx
import mlx.nn as nn

from .. import kernels
from ..kernels import BLOCK, Mode
from ..layers import GatedAttention, GatedDeltaNet, MoE, ResidentWeights, SwiGLU
from ..observe import cancel_point, note
from ..spec import FULL, ModelSpec
from ..state import LayerState
from ..streaming import ExpertProvider


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

    def __call__(self, x: mx.array, state: LayerState, mode: Mode) -> mx.array:
        """x [T, H] in, [T, H] out; `state` moves on by T."""
        if mode == "prefill":
            return self._prefill(x, state)
        x = self._feed_forward(x, self.mix(x, state, mode), mode)
        note(self.index, "hidden", x)
        return x

    def mix(self, x: mx.array, state: LayerState, mode: Mode) -> mx.array:
        """What the mixer adds to x."""
        mixed = self.mixer(self.input_normed(x), state, mode)
        note(self.index, self.kind, mixed)
        return mixed

    def input_normed(self, x: mx.array) -> mx.array:
        normed = kernels.rms_norm(x, self.input_norm, self.eps)
        note(self.index, "input_norm", normed)
        return normed

    def guess_choice_of(self, following: DecoderLayer) -> None:
        """Let this layer's experts guess those of the next: its router, on this layer's rows under its own norm."""
        if not isinstance(self.mlp, MoE) or not isinstance(following.mlp, MoE):
            return
        router, top_k = following.mlp.router.packed, following.mlp.top_k
        scale = mx.where(self.post_norm == 0, 0, following.post_norm / self.post_norm)
        # Here, since another thread could not.
        mx.eval(scale)
        self.mlp.experts.guess_next = lambda x: kernels.router((x * scale).astype(x.dtype), router, top_k, "verify")[0]

    def route(self, x: mx.array, mixed: mx.array, mode: Mode) -> kernels.Routed:
        """x plus what the mixer gave, its norm, and the experts chosen for that."""
        assert isinstance(self.mlp, MoE)
        return self.mlp.route(x, mixed, self.post_norm, self.eps, mode)

    def _feed_forward(self, x: mx.array, mixed: mx.array, mode: Mode) -> mx.array:
        if isinstance(self.mlp, MoE):
            return self.mlp(self.route(x, mixed, mode), mode)
        x, normed = kernels.add_rms_norm(x, mixed, self.post_norm, self.eps)
        note(self.index, "post_norm", normed)
        out = self.mlp(normed, mode)
        note(self.index, "mlp", out)
        return x + out

    def _prefill(self, x: mx.array, state: LayerState) -> mx.array:
        # Only x, the normed rows and the experts' sum span the chunk; everything else lives for one block.
        mode: Mode = "prefill"
        totals, normed, shared, ids, weights = [], [], [], [], []
        for start, stop in blocks(state.offset, x.shape[0], state.mark_at):
            cancel_point()
            rows = x[start:stop]
            if isinstance(self.mlp, MoE):
                routed = self.route(rows, self.mix(rows, state, mode), mode)
                rows = routed.total
                shared.append(self.mlp.shared_output(routed.normed, mode))
                normed.append(routed.normed)
                ids.append(routed.ids)
                weights.append(routed.weights)
                mx.eval(routed, state.state, shared[-1])
            else:
                rows = self._feed_forward(rows, self.mix(rows, state, mode), mode)
                mx.eval(rows, state.state)
            totals.append(rows)
        x = mx.concatenate(totals)
        if isinstance(self.mlp, MoE):
            rows, chosen, weight = mx.concatenate(normed), mx.concatenate(ids), mx.concatenate(weights)
            x = x + self.mlp.with_experts(rows, chosen, weight, mx.concatenate(shared), mode)
        note(self.index, "hidden", x)
        return x
