"""Least recently used."""

import numpy as np

from .base import Policy, policy


@policy("lru")
class LRU(Policy):
    """Scores an expert by the call that last used it."""

    clock = 0

    def used(self, experts: np.ndarray) -> None:
        self.clock += 1
        self.score[experts] = self.clock
