"""Choosing the next token: greedy, or drawn after temperature, top-k, top-p and min-p, in that order."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable

import mlx.core as mx

from .. import kernels
from ..errors import OptionError

# Tokens that are put in order first where no top_k says how many: cuts by probability rarely leave more.
FEW = 256
Sampler = Callable[[mx.array], mx.array]


def make_sampler(
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int | None = None,
) -> Sampler:
    """A function from f32 logits [V] to a token id, an int32 array of shape [].

    temperature: 0 is greedy, and the other numbers then do nothing. top_k: keep so many of the most probable tokens; 0
    keeps all. top_p: keep the most probable tokens until their probabilities sum to it. min_p: keep tokens of at least
    this part of the greatest probability. seed: 0 to 2**64 - 1; samplers of one seed draw alike, call by call; None
    picks one.
    """
    if not (isinstance(temperature, int | float) and 0 <= temperature < math.inf):
        raise OptionError(f"temperature is {temperature!r}; it must be a number of at least 0 (0 is greedy).")
    if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 0:
        raise OptionError(f"top_k is {top_k!r}; it must be an integer of at least 0 (0 keeps every token).")
    if not (isinstance(top_p, int | float) and 0 < top_p <= 1):
        raise OptionError(f"top_p is {top_p!r}; it must be above 0 and at most 1 (1 keeps every token).")
    if not (isinstance(min_p, int | float) and 0 <= min_p <= 1):
        raise OptionError(f"min_p is {min_p!r}; it must be from 0 to 1 (0 keeps every token).")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 64):
        raise OptionError(f"seed is {seed!r}; it must be an integer from 0 to {(1 << 64) - 1}.")
    if temperature == 0:
        return greedy
    key = mx.random.key(secrets.randbits(64) if seed is None else seed)

    def sample(logits: mx.array) -> mx.array:
        nonlocal key
        ids, scores = candidates(logits, temperature, top_k, top_p, min_p)
        key, once = mx.random.split(key)
        return ids[mx.random.categorical(scores, key=once)]

    return sample


def greedy(logits: mx.array) -> mx.array:
    """The most probable token of logits [V], the lowest id of several."""
    return kernels.top(logits, 1).reshape(())


def candidates(
    logits: mx.array, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[mx.array, mx.array]:
    """Tokens that may be drawn from logits [V], most probable first: their ids int32 [n] and log weights f32 [n].

    Tokens cut by top_p or min_p weigh -inf. The most probable token always stays.
    """
    if top_k == 0 and logits.shape[-1] > FEW and (top_p < 1 or min_p > 0):
        ids, scores = _weighed(logits, FEW, temperature, top_p, min_p)
        # Cuts leave a beginning of the order, so that tokens after one that is cut are cut as well.
        if scores[-1].item() == -math.inf:
            return ids, scores
    return _weighed(logits, top_k, temperature, top_p, min_p, among_all=top_k == 0)


def _weighed(
    logits: mx.array, count: int, temperature: float, top_p: float, min_p: float, among_all: bool = True
) -> tuple[mx.array, mx.array]:
    """`candidates` among the `count` most probable (0: all), by their probabilities among all, or among themselves."""
    ids = most_probable(logits, count)
    best = logits[ids[0]]
    scores = (logits[ids] - best) / temperature
    weights = mx.exp(scores)
    total = mx.exp((logits - best) / temperature).sum() if among_all else weights.sum()
    probabilities = weights / total
    kept = probabilities >= min_p * probabilities[0]
    if top_p < 1:
        kept &= mx.cumsum(probabilities) - probabilities < top_p
    return ids, mx.where(kept, scores, -math.inf)


def most_probable(logits: mx.array, count: int = 0) -> mx.array:
    """The ids int32 [count] of the greatest logits [V] in order, the lower id first of equals; all when count is 0."""
    size = logits.shape[-1]
    return kernels.top(logits, count if 0 < count < size else size)
