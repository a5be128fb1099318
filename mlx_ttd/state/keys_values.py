"""Keys and values of one attention layer, in f32, bf16 or 8-bit codes."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ..errors import ContextError
from ..kernels import KeptRows, quantise_rows, rows_parts
from ..spec import ModelSpec
from .one_sequence import OneSequence

NOWHERE = -1
FLOATS = {32: mx.float32, 16: mx.bfloat16}


class KVState(OneSequence):
    """Room for `capacity` positions, of which `offset` are filled, in plain numbers of 32 or 16 bits or codes of 8."""

    def __init__(self, spec: ModelSpec, capacity: int, bits: int):
        self.capacity, self.offset, self.mark_at = capacity, 0, NOWHERE
        self._bits, self._group = bits, spec.kv_group if bits == 8 else 0
        shape = spec.kv_heads, capacity, spec.head_dim
        self.keys, self.values = self._empty(*shape), self._empty(*shape)

    def _empty(self, heads: int, capacity: int, dim: int) -> KeptRows:
        if not self._group:
            return mx.zeros((heads, capacity, dim), FLOATS[self._bits])
        codes, groups = mx.zeros((heads, capacity, dim // 4), mx.uint32), (heads, capacity, dim // self._group)
        return codes, mx.zeros(groups, mx.bfloat16), mx.zeros(groups, mx.bfloat16)

    def _kept(self, rows: mx.array) -> KeptRows:
        """Numbers [kv_heads, positions, head_dim] in the form they are kept in."""
        return quantise_rows(rows, self._group) if self._group else rows.astype(FLOATS[self._bits])

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Add T positions; keys and values [T, kv_heads, head_dim]. ContextError where they do not fit."""
        stop = self.offset + keys.shape[0]
        if stop > self.capacity:
            raise ContextError(
                f"{stop:,} tokens exceed the context of {self.capacity:,} that memory was reserved for; "
                "shorten the prompt or load with a larger context=."
            )
        new = [part for rows in (keys, values) for part in rows_parts(self._kept(rows.transpose(1, 0, 2)))]
        for room, rows in zip(self.arrays, new, strict=True):
            room[:, self.offset : stop] = rows
        self.offset = stop

    @property
    def arrays(self) -> list[mx.array]:
        return rows_parts(self.keys) + rows_parts(self.values)

    def shapes(self, offset: int) -> list[tuple[int, ...]]:
        """Of the parts of `arrays` in use after `offset` positions."""
        return [(a.shape[0], offset, a.shape[2]) for a in self.arrays]

    def moment(self) -> tuple[Any, ...]:
        """Where it is: `go_to` comes back to it as long as no other sequence was written meanwhile."""
        return (self.offset,)

    def go_to(self, moment: tuple[Any, ...]) -> None:
        (self.offset,) = moment

    def mark(self, at: int) -> None:
        self.mark_at = at

    @property
    def passed_mark(self) -> bool:
        return self.offset >= self.mark_at

    def back_to_mark(self) -> None:
        """Forget the positions from `mark_at` on."""
        self.offset = self.mark_at

    def is_trimmable(self) -> bool:
        return False

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays)
