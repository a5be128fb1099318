"""Mixture of experts: router, experts streamed through slots, shared expert."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .. import kernels
from ..kernels import Mode
from ..observe import note, watched
from ..spec import ModelSpec
from ..streaming import ExpertProvider
from .mlp import SwiGLU
from .weights import ResidentWeights


class StreamedExperts(nn.Module):
    """The routed experts of one layer, brought by `provider`. Use it in a model of your own in place of its experts."""

    def __init__(self, provider: ExpertProvider, layer: int):
        super().__init__()
        self.provider, self.layer = provider, layer
        self.layout = provider.layout(layer)
        self.guess_next: Callable[[mx.array], mx.array] | None = None

    def __call__(
        self, x: mx.array, ids: mx.array, weights: mx.array, mode: Mode, meanwhile: Sequence[mx.array] = ()
    ) -> mx.array:
        """Weighted sum of the chosen experts: f32 [T, H]. x [T, H]; ids int32 [T, k] ascending; weights f32 [T, k].

        `meanwhile` are arrays to compute while experts are read. In a thread of your own: evaluate the sum there before
        another thread uses the model. BusyError while one does.
        """
        call = self.provider.begin_call(self.layer, sys._getframe())
        try:
            return self._summed(x, ids, weights, mode, meanwhile)
        finally:
            self.provider.end_call(call)

    def _summed(
        self, x: mx.array, ids: mx.array, weights: mx.array, mode: Mode, meanwhile: Sequence[mx.array]
    ) -> mx.array:
        if mode == "prefill":
            return self._prefill(x, ids, weights)
        lease = self.provider.resident(self.layer, ids)
        if lease is not None:
            return kernels.expert_ffn(x, lease, ids, weights, self.layout)
        chosen, guessed = self._read_back_with_guess(x, ids, meanwhile)
        contributions = None
        for lease in self.provider.arrivals(self.layer, chosen):
            note(self.layer, "read")
            if guessed is not None and self.provider.next_layer is not None:
                self.provider.next_layer.start(self.layer + 1, guessed)
                guessed = None
            if lease.holds_all:
                out = kernels.expert_ffn(x, lease, ids, weights, self.layout)
                lease.release()
                return out
            part = kernels.expert_contributions(x, lease, ids, self.layout)
            mx.async_eval(part)
            if contributions is None:
                contributions = part
            else:
                lent = (chosen[..., None] == lease.experts).any(axis=-1, keepdims=True)
                contributions = mx.where(kernels.to_device(lent), part, contributions)
            lease.release()
        assert contributions is not None
        return kernels.combine(contributions, weights)

    def _prefill(self, x: mx.array, ids: mx.array, weights: mx.array) -> mx.array:
        total = mx.zeros(x.shape, mx.float32)
        for lease in self.provider.waves(self.layer, self._read_back(ids, (x, weights))):
            note(self.layer, "read")
            total = kernels.expert_ffn_accumulate(total, x, lease, ids, weights, self.layout)
            note(self.layer, "experts.wave", total)
            mx.eval(total)
            lease.release(())
        return total

    def _read_back_with_guess(
        self, x: mx.array, ids: mx.array, meanwhile: Sequence[mx.array]
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """The choice, and the guess at the next layer's where one is due: both wait for the device once."""
        ahead = self.provider.next_layer
        if ahead is None or not ahead.trial.due(self.layer) or self.guess_next is None:
            return self._read_back(ids, meanwhile), None
        both = self._read_back(mx.concatenate([ids, self.guess_next(x)]), meanwhile)
        return both[: len(ids)], both[len(ids) :]

    def _read_back(self, ids: mx.array, meanwhile: Sequence[mx.array]) -> np.ndarray:
        self.provider.counters.host_syncs += 1
        return kernels.to_host(ids, meanwhile)


class MoE(nn.Module):
    def __init__(self, spec: ModelSpec, weights: ResidentWeights, prefix: str, provider: ExpertProvider, layer: int):
        super().__init__()
        self.layer = layer
        self.top_k = spec.top_k
        self.router = weights.linear(prefix + "moe.router")
        self.experts = StreamedExperts(provider, layer)
        self.shared = SwiGLU(weights, prefix + "shared.")
        self.shared_scale = weights.linear(prefix + "shared.scale")

    def route(self, x: mx.array, mixed: mx.array, norm: mx.array, eps: float, mode: Mode) -> kernels.Routed:
        """x [T, H] plus what the mixer gave, its norm, and the experts chosen for that."""
        routed = kernels.route(x, mixed, norm, eps, self.router.packed, self.top_k, mode)
        note(self.layer, "post_norm", routed.normed)
        note(self.layer, "router.ids", routed.ids, routed.weights)
        note(self.layer, "router.weights", routed.weights)
        return routed

    @property
    def shared_weights(self) -> kernels.SharedExpert:
        linears = (self.shared.gate, self.shared.up, self.shared.down, self.shared_scale)
        return kernels.SharedExpert(*(linear.packed for linear in linears))

    def shared_output(self, x: mx.array, mode: Mode) -> mx.array:
        """The gated shared expert, f32 [T, H]."""
        shared = kernels.shared_expert(x, self.shared_weights, mode)
        note(self.layer, "shared", shared)
        return shared

    def with_experts(self, x: mx.array, ids: mx.array, weights: mx.array, shared: mx.array, mode: Mode) -> mx.array:
        """The chosen experts of x [T, H], then the shared one, in x's dtype."""
        out = (self.experts(x, ids, weights, mode, meanwhile=(shared,)) + shared).astype(x.dtype)
        note(self.layer, "experts", out)
        return out

    def __call__(self, routed: kernels.Routed, mode: Mode) -> mx.array:
        """The rows' total plus the experts chosen for their norm."""
        residual, x, ids, weights = routed
        if mode != "prefill" and not watched():
            lease = self.experts.provider.resident(self.layer, ids)
            if lease is not None:
                return kernels.moe(residual, x, lease, ids, weights, self.experts.layout, self.shared_weights, mode)
        return residual + self.with_experts(x, ids, weights, self.shared_output(x, mode), mode)
