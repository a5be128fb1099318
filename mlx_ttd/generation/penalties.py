"""Logits processors: functions that change the logits of the next token, given the tokens so far.

A processor is `processor(tokens, logits) -> logits`: tokens are the ids of the whole sequence, prompt first; logits are
f32 [V] and so is what it returns, a new array. Processors run in the order given, before temperature. Any such callable
will do, which is also the way to plug in structured output: give -inf to the tokens that a grammar forbids.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import mlx.core as mx

from ..errors import OptionError

Processor = Callable[[Sequence[int], mx.array], mx.array]
MOST_IDS = 1 << 31


def checked(processor: Processor) -> Processor:
    """`processor`, with an OptionError where it returns anything but f32 logits of the shape it was given."""

    def process(tokens: Sequence[int], logits: mx.array) -> mx.array:
        found: object = processor(tokens, logits)
        if isinstance(found, mx.array) and (found.shape, found.dtype) == (logits.shape, mx.float32):
            return found
        what = f"{found.dtype} {list(found.shape)}" if isinstance(found, mx.array) else f"a {type(found).__name__}"
        raise OptionError(
            f"the processor {getattr(processor, '__qualname__', processor)} returned {what}; it must return "
            f"logits, an mx.array of {mx.float32} {list(logits.shape)}."
        )

    return process


def repetition_penalty(penalty: float) -> Processor:
    """Divide positive logits of tokens seen so far, prompt included, by `penalty`, and multiply negative ones by it."""
    if not (isinstance(penalty, int | float) and 0 < penalty < math.inf):
        raise OptionError(f"repetition_penalty is {penalty!r}; it must be a number above 0 (1 changes nothing).")

    def process(tokens: Sequence[int], logits: mx.array) -> mx.array:
        if not tokens:
            return logits
        ids = mx.array(sorted(set(tokens)))
        seen = logits[ids]
        return mx.put_along_axis(logits, ids, mx.where(seen < 0, seen * penalty, seen / penalty), axis=0)

    return process


def presence_penalty(penalty: float, prompt_length: int = 0) -> Processor:
    """Subtract `penalty` from the logits of tokens that were generated, those after the first `prompt_length`."""
    return _subtract("presence_penalty", penalty, prompt_length, lambda count: 1)


def frequency_penalty(penalty: float, prompt_length: int = 0) -> Processor:
    """Subtract `penalty` from a token's logit for each time it was generated, after the first `prompt_length` ids."""
    return _subtract("frequency_penalty", penalty, prompt_length, lambda count: count)


def _subtract(name: str, penalty: float, prompt_length: int, weight: Callable[[int], int]) -> Processor:
    if not (isinstance(penalty, int | float) and math.isfinite(penalty)):
        raise OptionError(f"{name} is {penalty!r}; it must be a finite number (0 changes nothing).")

    def process(tokens: Sequence[int], logits: mx.array) -> mx.array:
        counts = Counter(tokens[prompt_length:])
        if not counts:
            return logits
        amounts = mx.array([penalty * weight(count) for count in counts.values()], dtype=mx.float32)
        return logits.at[mx.array(list(counts))].subtract(amounts)

    return process


def logit_bias(bias: Mapping[int, float]) -> Processor:
    """Add a number to the logits of some token ids; -inf forbids a token, while +inf and NaN are refused."""
    for token, amount in bias.items():
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < MOST_IDS:
            raise OptionError(
                f"logit_bias has the key {token!r}; keys are token ids, at least 0 and below the vocabulary."
            )
        if isinstance(amount, bool) or not (isinstance(amount, int | float) and amount < math.inf):
            raise OptionError(f"logit_bias[{token}] is {amount!r}; it must be a number below infinity.")
    ids = mx.array(list(bias), dtype=mx.int32)
    amounts = mx.array(list(bias.values()), dtype=mx.float32)
    highest = max(bias, default=-1)

    def process(tokens: Sequence[int], logits: mx.array) -> mx.array:
        if highest >= logits.shape[-1]:
            raise OptionError(
                f"logit_bias has the token id {highest}; this model has {logits.shape[-1]:,} of them, from 0."
            )
        return logits.at[ids].add(amounts) if bias else logits

    return process


def make_processors(
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
    bias: Mapping[int, float] | None = None,
    prompt_length: int = 0,
) -> list[Processor]:
    """The processors that these numbers ask for, in this order; those that would change nothing are left out."""
    processors = []
    if repetition != 1:
        processors.append(repetition_penalty(repetition))
    if presence != 0:
        processors.append(presence_penalty(presence, prompt_length))
    if frequency != 0:
        processors.append(frequency_penalty(frequency, prompt_length))
    if bias:
        processors.append(logit_bias(bias))
    return processors
