"""What a sequence carries from token to token: keys and values, conv tails and recurrent states, one object a layer."""

from __future__ import annotations

import mlx.core as mx

from ..errors import ContextError
from ..spec import FULL, ModelSpec

NOWHERE = -1


class KVState:
    """Keys and values of one attention layer, [kv_heads, capacity, head_dim], with `offset` positions filled."""

    def __init__(self, kv_heads: int, head_dim: int, capacity: int, dtype: mx.Dtype):
        self.keys = mx.zeros((kv_heads, capacity, head_dim), dtype)
        self.values = mx.zeros((kv_heads, capacity, head_dim), dtype)
        self.offset = 0
        self.mark_at = NOWHERE

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Add T positions; keys and values [T, kv_heads, head_dim]. ContextError where they do not fit."""
        stop = self.offset + keys.shape[0]
        if stop > self.keys.shape[1]:
            raise ContextError(
                f"{stop:,} tokens exceed the context of {self.keys.shape[1]:,} that memory was reserved for; "
                "shorten the prompt or load with a larger context=."
            )
        self.keys[:, self.offset : stop] = keys.transpose(1, 0, 2).astype(self.keys.dtype)
        self.values[:, self.offset : stop] = values.transpose(1, 0, 2).astype(self.values.dtype)
        self.offset = stop

    @property
    def state(self) -> list[mx.array]:
        return [self.keys, self.values]

    def filled(self) -> list[mx.array]:
        """Copies of the positions in use."""
        return [mx.contiguous(a[:, : self.offset]) for a in self.state]

    def shapes(self, offset: int) -> list[tuple[int, ...]]:
        """Of what `filled` gives after `offset` positions."""
        heads, _, dim = self.keys.shape
        return [(heads, offset, dim)] * 2

    def restore(self, arrays: list[mx.array], offset: int) -> None:
        self.offset = 0
        keys, values = (a.transpose(1, 0, 2) for a in arrays)
        self.append(keys, values)

    def mark(self, at: int) -> None:
        self.mark_at = at

    def back_to_mark(self) -> None:
        """Forget the positions from `mark_at` on."""
        self.offset = self.mark_at

    def is_trimmable(self) -> bool:
        return False

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.state)


class RecurrentState:
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

    def mark(self, at: int) -> None:
        """Choose a position to come, in place of the one so far; NOWHERE keeps nothing."""
        self.mark_at, self._marked = at, None

    def back_to_mark(self) -> None:
        """Be again what it was after `mark_at` positions, which have passed."""
        assert self._marked is not None
        (self.conv, self.recurrent), self.offset = self._marked, self.mark_at

    @property
    def state(self) -> list[mx.array]:
        return [self.conv, self.recurrent]

    def filled(self) -> list[mx.array]:
        """Copies of the arrays."""
        return [mx.contiguous(a) for a in self.state]

    def shapes(self, offset: int) -> list[tuple[int, ...]]:
        """Of what `filled` gives, whatever the offset."""
        return [a.shape for a in self.state]

    def restore(self, arrays: list[mx.array], offset: int) -> None:
        self.conv, self.recurrent = arrays
        self.offset = offset

    def is_trimmable(self) -> bool:
        return False

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.state)


LayerState = KVState | RecurrentState


def new_state(spec: ModelSpec, context: int, dtype: mx.Dtype, kv_dtype: mx.Dtype) -> list[LayerState]:
    """An empty state for `context` positions, one object a layer."""
    return [
        KVState(spec.kv_heads, spec.head_dim, context, kv_dtype) if kind == FULL else RecurrentState(spec, dtype)
        for kind in spec.layer_types
    ]


def state_bytes(spec: ModelSpec, context: int, itemsize: int, kv_itemsize: int) -> int:
    """Bytes of `new_state`."""
    return context * spec.kv_bytes_per_token(kv_itemsize) + spec.recurrent_bytes(itemsize)
