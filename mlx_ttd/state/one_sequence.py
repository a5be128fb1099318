"""A layer's state as mlx-lm's batches and prompt files meet it: a batch of one, that mlx-lm does not save."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from ..errors import KernelError

State = TypeVar("State", bound="OneSequence")
BATCHES = (
    "this model runs one sequence at a time and cannot batch {count}; set batch_size=1 (mlx_lm.benchmark: -b 1, "
    "mlx_lm.evaluate and mlx_lm.perplexity: --batch-size 1, mlx_lm.batch_generate: prefill_batch_size=1 and "
    "completion_batch_size=1, mlx_lm.server: --decode-concurrency 1 and --prompt-concurrency 1)."
)


class OneSequence:
    """The part of mlx-lm's cache protocol that has to do with batches."""

    def merge(self: State, states: Sequence[State]) -> State:
        """A batch of `states`. KernelError for more than one."""
        if len(states) != 1:
            raise KernelError(BATCHES.format(count=len(states)))
        return states[0]

    def extend(self, other: OneSequence) -> None:
        raise KernelError(BATCHES.format(count=2))

    def filter(self, keep: Sequence[int]) -> None:
        """Keep the sequences at these places: the only one."""
        assert list(keep) == [0]

    def extract(self: State, index: int) -> State:
        """The sequence at a place of the batch."""
        assert index == 0
        return self
