"""How probable the model held a token, natural log."""

from __future__ import annotations

import mlx.core as mx
import numpy as np


def token_logprob(logits: mx.array, token: int) -> float:
    """log p(token) under logits [V], before temperature and cuts."""
    return float(np.asarray(logits[mx.array([token])] - mx.logsumexp(logits))[0])
