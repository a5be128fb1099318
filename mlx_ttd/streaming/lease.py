"""A hold on the slots of some experts, for kernels that run later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType

import mlx.core as mx
import numpy as np


class Lease:
    """`records` uint8 [slots, stride] and `slot_of` int32 [E] (-1: not in this lease) for the ids `experts`.

    `holds_all`: the only lease of its call. Kernels append what they return to `outputs`. MLX is lazy: the slots stay
    pinned until the arrays given to `release` (by default the outputs) have been evaluated. Leaving a `with` block
    unreleased evaluates the outputs.
    """

    def __init__(
        self,
        records: mx.array,
        slot_of: mx.array,
        on_release: Callable[[Sequence[mx.array]], None],
        experts: np.ndarray,
        holds_all: bool = True,
    ):
        self.records, self.slot_of = records, slot_of
        self.experts, self.holds_all = experts, holds_all
        self.outputs: list[mx.array] = []
        self._on_release: Callable[[Sequence[mx.array]], None] | None = on_release

    @property
    def released(self) -> bool:
        return self._on_release is None

    def release(self, after: Sequence[mx.array] | None = None) -> None:
        """Let the slots be reused once `after` is evaluated. Later calls do nothing."""
        if self._on_release is not None:
            on_release, self._on_release = self._on_release, None
            on_release(self.outputs if after is None else after)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.released:
            mx.eval(self.outputs)
            self.release(())
