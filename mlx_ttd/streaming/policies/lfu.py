"""Least frequently used, with ageing."""

import numpy as np

from .base import Policy, policy

GROWTH = 1.02
RESCALE = 1e12


@policy("lfu")
class AgedLFU(Policy):
    """Counts uses; a use weighs 2% more at each call, so old uses fade without touching their scores."""

    weight = 1.0

    def used(self, experts: np.ndarray) -> None:
        self.weight *= GROWTH
        self.score[experts] += self.weight
        if self.weight > RESCALE:
            self.score /= self.weight
            self.weight = 1.0
