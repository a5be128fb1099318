"""A decode step through one layer as compiled graphs, for a GPU that holds all of the layer's experts.

The host then replays a trace instead of building some twenty operations, which costs it more than they cost the GPU.
Own kernels do everything that multiplies and adds, so that compiling fuses nothing whose rounding it could change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from .. import kernels
from ..layers import MoE
from ..observe import watched
from ..state import LayerState, RecurrentState
from ..streaming import Lease
from .decoder_layer import DecoderLayer

Graph = Callable[..., tuple[mx.array, ...]]


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
        self._recurrent: Graph = kernels.compiled(self._trace_recurrent)
        self._project: Graph = kernels.compiled(self._trace_project)
        self._attend: Graph = kernels.compiled(self._trace_attend)

    def __call__(self, x: mx.array, state: LayerState) -> mx.array | None:
        """x [1, H] one layer on, `state` moved; None where the step cannot run so and nothing was done."""
        layer, moe = self.layer, self.layer.mlp
        if kernels.chosen("expert_ffn") != "gpu" or not isinstance(moe, MoE) or watched():
            return None
        lease = moe.experts.provider.whole(moe.layer)
        if lease is None:
            return None
        bank = (lease.records, lease.slot_of)
        if isinstance(state, RecurrentState):
            x, ids, conv, recurrent = self._recurrent(x, state.conv, state.recurrent, *bank)
            state.advance(conv, recurrent, 1)
        elif layer.mixer.spec.head_dim in kernels.ATTENTION_WIDTHS:
            offset = kernels.position(state.offset)
            q, gate, k, v = self._project(x, offset)
            state.append(k, v)
            x, ids = self._attend(x, q, gate, state.keys, state.values, offset, *bank)
        else:
            return None
        moe.experts.provider.count_later(moe.layer, ids)
        return x

    def _trace_recurrent(
        self, x: mx.array, conv: mx.array, recurrent: mx.array, records: mx.array, slot_of: mx.array
    ) -> tuple[mx.array, ...]:
        state: Any = PassingState(conv, recurrent)
        mixed = self.layer.mix(x, state, "decode")
        return *self._feed_forward(x, mixed, records, slot_of), state.conv, state.recurrent

    def _trace_project(self, x: mx.array, offset: mx.array) -> tuple[mx.array, ...]:
        attention: Any = self.layer.mixer
        return attention.project(self.layer.input_normed(x), offset, "decode")

    def _trace_attend(
        self,
        x: mx.array,
        q: mx.array,
        gate: mx.array,
        keys: mx.array,
        values: mx.array,
        offset: mx.array,
        records: mx.array,
        slot_of: mx.array,
    ) -> tuple[mx.array, ...]:
        attention: Any = self.layer.mixer
        mixed = attention.attend(q, gate, keys, values, offset, "decode")
        return self._feed_forward(x, mixed, records, slot_of)

    def _feed_forward(
        self, x: mx.array, mixed: mx.array, records: mx.array, slot_of: mx.array
    ) -> tuple[mx.array, mx.array]:
        """x plus what the mixer gave and the layer's experts, and the experts chosen."""
        moe = self.layer.mlp
        assert isinstance(moe, MoE)
        total, inner, ids, weights = self.layer.route(x, mixed, "decode")
        lease = Lease(records, slot_of, lambda after: None, np.arange(slot_of.size))
        return kernels.moe(total, inner, lease, ids, weights, moe.experts.layout, moe.shared_weights, "decode"), ids
