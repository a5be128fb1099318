"""How probable the model held a token, natural log."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from .sampling import most_probable


def token_logprob(logits: mx.array, token: int) -> float:
    """log p(token) under logits [V], before temperature and cuts."""
    return _floats(logits[mx.array([token])] - mx.logsumexp(logits))[0]


def top_logprobs(logits: mx.array, count: int) -> list[tuple[int, float]]:
    """The `count` most probable tokens of logits [V] with their log p, the most probable first; none when 0."""
    if count < 1:
        return []
    ids = most_probable(logits, count)[:count]
    values = _floats(logits[ids] - mx.logsumexp(logits))
    return [(int(token), value) for token, value in zip(np.asarray(ids), values, strict=True)]


def _floats(values: mx.array) -> list[float]:
    return [float(value) for value in np.asarray(values)]
