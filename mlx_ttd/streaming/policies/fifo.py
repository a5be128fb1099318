"""First in, first out."""

import numpy as np

from .base import Policy, policy


@policy("fifo")
class FIFO(Policy):
    """Scores an expert by the read that brought it in."""

    clock = 0

    def inserted(self, experts: np.ndarray) -> None:
        self.score[experts] = self.clock + np.arange(len(experts))
        self.clock += len(experts)
