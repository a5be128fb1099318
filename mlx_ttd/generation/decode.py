"""The loop: a prompt in aligned chunks, then one token after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import mlx.core as mx
import numpy as np

from ..kernels import counting, device_kind
from ..models import Model
from ..observe import Counters
from ..state import NOWHERE, LayerState


@dataclass
class Running:
    """A sequence on a model: the tokens whose effect `state` holds, and the one sampled since, if any.

    marked: how many of the tokens the state can go back to, 0 where it cannot. reading: tokens of a chunk that layers
    pass one after the other.
    """

    model: Model
    state: list[LayerState]
    tokens: list[int] = field(default_factory=list)
    sampled: int | None = None
    marked: int = 0
    reading: list[int] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """Whether every layer has seen the tokens and no more, which a step that was cut short leaves undone."""
        return all(layer.offset == len(self.tokens) for layer in self.state)

    def recover(self) -> bool:
        """Whether the state is whole, or is so at its mark, to which it then goes back."""
        read, self.reading = self.reading, []
        if self.whole:
            return True
        if not self.marked or not all(layer.passed_mark for layer in self.state):
            return False
        # The mark may lie within the chunk.
        self.tokens += read
        self._back_to_mark()
        return True

    def mark(self, at: int) -> None:
        """Make the state after `at` tokens, those there are now or more, the one to go back to; 0: none."""
        self.marked = at
        for layer in self.state:
            layer.mark(at or NOWHERE)

    def resume(self, ids: Sequence[int]) -> bool:
        """Whether `ids` extend the tokens, or those up to the mark, to which the state then goes back."""
        if 0 < len(self.tokens) < len(ids) and list(ids[: len(self.tokens)]) == self.tokens:
            return True
        if not 0 < self.marked < len(ids) or list(ids[: self.marked]) != self.tokens[: self.marked]:
            return False
        self._back_to_mark()
        return True

    def _back_to_mark(self) -> None:
        for layer in self.state:
            layer.back_to_mark()
        del self.tokens[self.marked :]
        self.sampled = None


@dataclass(frozen=True)
class Step:
    """A sampled token and the f32 logits [V] it was sampled from, after the processors.

    seconds: wall time of the decode step alone; misses: expert records it had to read.
    """

    token: int
    logits: mx.array
    seconds: float = 0.0
    misses: int = 0


def prefill(sequence: Running, tokens: Sequence[int], chunk: int, counters: Counters) -> Iterator[tuple[int, int]]:
    """Pass `tokens` through the model without logits, in chunks cut where absolute position is a multiple of `chunk`.

    Yields (done, total) after each chunk, when tokens and state are whole. A chunk that fails or is cancelled leaves
    layers at unequal positions: see `Running.recover`.
    """
    model, offset = sequence.model, len(sequence.tokens)
    cuts = [0, *range(chunk - offset % chunk, len(tokens), chunk), len(tokens)]
    for start, stop in pairwise(cuts):
        if start == stop:
            continue
        part = sequence.reading = list(tokens[start:stop])
        with counting(counters):
            mx.eval(model.hidden_states(model.embed(np.array(part)), sequence.state, "prefill"))
        mx.eval([layer.state for layer in sequence.state])
        if device_kind() != "cpu":
            mx.clear_cache()
        sequence.tokens += part
        sequence.reading = []
        counters.prefill_tokens += len(part)
        yield stop, len(tokens)


def decode(sequence: Running, token: int, counters: Counters) -> mx.array:
    """Pass one token and return the f32 logits [V] of what follows, evaluated together with the state."""
    model = sequence.model
    with counting(counters):
        hidden = model.hidden_states(model.embed(np.array([token])), sequence.state, "decode")
        logits = model.logits(hidden, "decode")[0]
    mx.eval(logits, [layer.state for layer in sequence.state])
    sequence.tokens.append(token)
    sequence.sampled = None
    counters.decode_steps += 1
    counters.host_syncs += 1
    return logits
