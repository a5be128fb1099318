"""What a sequence carries from token to token, one object a layer."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ..spec import FULL, ModelSpec
from .keys_values import NOWHERE, KVState
from .one_sequence import OneSequence


class RecurrentState(OneSequence):
    """Conv tail [taps - 1, channels] and f32 recurrent state [value_heads, value_dim, key_dim] of one GDN layer.

    What they are after `mark_at` positions is kept once these have passed, for `back_to_mark`.
    """

    def __init__(self, spec: ModelSpec, dtype: mx.Dtype):
        self.conv = mx.zeros((spec.conv - 1, spec.conv_width), dtype)
        self.recurrent = mx.zeros((spec.value_heads, spec.value_dim, spec.key_dim), mx.float32)
        self.offset = 0
        self.mark_at = NOWHERE
        self._marked: tuple[mx.array, mx.array] | None = None

    def advance(self, conv: mx.array, recurrent: mx.array, tokens: int) -> None:
        self.conv, self.recurrent = conv, recurrent
        self.offset += tokens
        if self.offset == self.mark_at:
            self._marked = conv, recurrent

    def moment(self) -> tuple[Any, ...]:
        """Where it is, for `go_to`; holding it keeps a second state."""
        return self.offset, self.conv, self.recurrent

    def go_to(self, moment: tuple[Any, ...]) -> None:
        self.offset, self.conv, self.recurrent = moment

    def mark(self, at: int) -> None:
        """Choose this position or one to come, in place of the one so far; NOWHERE keeps nothing."""
        self.mark_at = at
        self._marked = (self.conv, self.recurrent) if at == self.offset else None

    @property
    def passed_mark(self) -> bool:
        return self._marked is not None

    def back_to_mark(self) -> None:
        """Be again what it was after `mark_at` positions, which have passed."""
        assert self._marked is not None
        (self.conv, self.recurrent), self.offset = self._marked, self.mark_at

    @property
    def arrays(self) -> list[mx.array]:
        return [self.conv, self.recurrent]

    def shapes(self, offset: int) -> list[tuple[int, ...]]:
        """Of `arrays`, whatever the offset."""
        return [a.shape for a in self.arrays]

    def is_trimmable(self) -> bool:
        return False

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays)


LayerState = KVState | RecurrentState


def new_state(spec: ModelSpec, context: int, dtype: mx.Dtype, kv_bits: int) -> list[LayerState]:
    """An empty state for `context` positions, one object a layer. kv_bits: 32, 16 or 8."""
    return [
        KVState(spec, context, kv_bits) if kind == FULL else RecurrentState(spec, dtype) for kind in spec.layer_types
    ]


def state_bytes(spec: ModelSpec, context: int, itemsize: int, kv_bits: int) -> int:
    """Bytes of `new_state`."""
    return context * spec.kv_bytes_per_token(kv_bits) + spec.recurrent_bytes(itemsize)
