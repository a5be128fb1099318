"""A layer's state as mlx-lm's batches and prompt files meet it: a batch of one, that mlx-lm does not save."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import mlx.core as mx

from ..errors import KernelError, StateError

State = TypeVar("State", bound="OneSequence")
BATCHES = (
    "this model runs one sequence at a time and cannot batch {count}; set batch_size=1 (mlx_lm.benchmark: -b 1, "
    "mlx_lm.evaluate and mlx_lm.perplexity: --batch-size 1, mlx_lm.batch_generate: prefill_batch_size=1 and "
    "completion_batch_size=1, mlx_lm.server: --decode-concurrency 1 and --prompt-concurrency 1)."
)


class NotForFiles:
    """Stands among the arrays of a state. mx.eval passes over it; mlx-lm, when it saves a prompt, asks for its text."""

    def __format__(self, form: str) -> str:
        raise StateError(
            "mlx-lm cannot save a state of this model, since it could not load it again; use llm.save_state(path)."
        )


class OneSequence:
    """The part of mlx-lm's cache protocol that has to do with batches and files."""

    @property
    def arrays(self) -> list[mx.array]:
        """What the layer keeps, the rooms for positions to come included."""
        raise NotImplementedError

    @property
    def state(self) -> list[Any]:
        """`arrays` for mlx-lm, to be evaluated but not saved."""
        return [*self.arrays, NotForFiles()]

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
