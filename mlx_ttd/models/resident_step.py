"""A decode step through one layer as compiled graphs, for a GPU that holds all of the layer's experts.

The host then replays a trace instead of building some twenty operations, which costs it more than they cost the GPU.
Own kernels do everything that multiplies and adds, so that compiling fuses nothing whose rounding it could change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from .. import kernels
from ..layers import GatedDeltaNet, MoE
from ..observe import watched
from ..state import LayerState, RecurrentState
from ..streaming import Lease

if TYPE_CHECKING:
    from .qwen3_5 import DecoderLayer


class PassingState:
    """Stands in for a RecurrentState while a step is traced."""

    def __init__(self, conv: mx.array, recurrent: mx.array):
        self.conv, self.recurrent = conv, recurrent

    def advance(self, conv: mx.array, recurrent: mx.array, tokens: int) -> None:
        self.conv, self.recurrent = conv, recurrent


class ResidentStep:
    """The compiled step of `layer`, traced when it first runs."""

    def __init__(self, layer: DecoderLayer):
        self.layer = layer
        self._mix: Callable[..., tuple[mx.array, ...]] = mx.compile(self._trace_mix)
        self._feed_forward: Callable[..., tuple[mx.array, ...]] = mx.compile(self._trace_feed_forward)

    def __call__(self, x: mx.array, state: LayerState) -> mx.array | None:
        """x [1, H] one layer on, `state` moved; None where the step cannot run so and nothing was done."""
        moe = self.layer.mlp
        if kernels.device_kind() == "cpu" or not isinstance(moe, MoE) or watched():
            return None
        lease = moe.experts.provider.whole(moe.layer)
        if lease is None:
            return None
        if isinstance(self.layer.mixer, GatedDeltaNet) and isinstance(state, RecurrentState):
            x, conv, recurrent = self._mix(x, state.conv, state.recurrent)
            state.advance(conv, recurrent, 1)
        else:
            x = self.layer.mix(x, state, "decode")
        x, ids = self._feed_forward(x, lease.records, lease.slot_of)
        moe.experts.provider.count_later(moe.layer, ids)
        return x

    def _trace_mix(self, x: mx.array, conv: mx.array, recurrent: mx.array) -> tuple[mx.array, ...]:
        state = PassingState(conv, recurrent)
        return self.layer.mix(x, state, "decode"), state.conv, state.recurrent  # type: ignore[arg-type]

    def _trace_feed_forward(self, x: mx.array, records: mx.array, slot_of: mx.array) -> tuple[mx.array, ...]:
        moe = self.layer.mlp
        assert isinstance(moe, MoE)
        inner = self.layer.post_normed(x)
        ids, weights = moe.route(inner, "decode")
        lease = Lease(records, slot_of, lambda after: None, np.arange(slot_of.size))
        routed = kernels.expert_ffn(inner, lease, ids, weights, moe.experts.layout)
        return x + (routed + moe.shared_output(inner, "decode")).astype(x.dtype), ids
