"""Running, before there is a prompt, what a first one and its tokens run: kernels get compiled and slots filled."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from . import kernels
from .generation import Running, decode, prefill
from .models import Model
from .observe import Counters
from .streaming import ExpertProvider

STEPS = 2


def warm_up(model: Model, provider: ExpertProvider | None, counters: Counters, show: Callable[[str], None]) -> None:
    """Read a block of tokens and decode two, on a sequence that is then dropped; nothing of it is counted.

    Where the slots hold all experts, all are read. show: called with the name of each kernel that is made ready.
    """
    before = counters.copy()
    rows = min(kernels.BLOCK, max(0, model.context - STEPS))
    tokens = np.linspace(0, model.spec.vocab - 1, rows).astype(int).tolist()
    sequence = Running(model, model.make_cache())
    with kernels.announcing(show):
        for _ in prefill(sequence, tokens, kernels.BLOCK, counters):
            pass
        if provider is not None and provider.slots >= model.spec.experts:
            for layer in range(len(provider.banks)):
                for lease in provider.waves(layer, np.arange(model.spec.experts)):
                    lease.release(())
        for token in range(min(STEPS, model.context)):
            decode(sequence, token, counters)
    if provider is not None:
        provider.settle()
    for name, value in vars(before).items():
        setattr(counters, name, value)
