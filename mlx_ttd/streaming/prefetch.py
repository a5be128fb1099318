"""Experts read for the next layer while this one computes, by a guess at what its router will choose."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..observe import Counters
from .arrival import Arrival
from .read_pool import Batch, NativeBatch
from .slots import EMPTY, SlotBank

PREFETCH = ("off", "next-layer")
WINDOW, TOLERANCE = 16, 1.05

Submit = Callable[[int, np.ndarray, list[memoryview]], Batch | NativeBatch]


class Trial:
    """Whether guessing pays. The first window of steps fills the banks, the second is measured without guesses, and
    guessing ends for good with the first window after it whose steps wait longer for reads."""

    def __init__(self, counters: Counters, window: int = WINDOW):
        self._counters, self._window = counters, window
        self._layer, self._seen, self._waited = -1, 0.0, 0.0
        self._steps = self._windows = 0
        self._without: float | None = None
        self.on = False

    def due(self, layer: int) -> bool:
        """Whether to guess while `layer` computes. To be asked in every layer that reads, in order, step after step."""
        wait = self._counters.wait_seconds
        if layer > self._layer:
            self._waited += max(0.0, wait - self._seen)
        else:
            self._step()
        self._layer, self._seen = layer, wait
        return self.on

    def _step(self) -> None:
        self._steps += 1
        if self._steps % self._window:
            return
        waited, self._waited = self._waited, 0.0
        self._windows += 1
        if self._windows == 2:
            self._without, self.on = waited, True
        elif self._without is not None and waited > self._without * TOLERANCE:
            self.on = False


class NextLayer:
    """Guessed reads in flight, at most one batch a layer, in slots that nothing leased. `trial` tells when to guess."""

    def __init__(self, banks: Sequence[SlotBank], counters: Counters, submit: Submit):
        self._banks, self._counters, self._submit = banks, counters, submit
        self._flying: dict[int, Arrival] = {}
        self.trial = Trial(counters)

    def flying(self, layer: int) -> bool:
        return layer in self._flying

    def start(self, layer: int, ids: np.ndarray) -> None:
        """Read what `layer` lacks of the experts `ids`; a guessed expert that is there is not evicted for another."""
        if layer in self._flying:
            return
        bank, guess = self._banks[layer], np.unique(ids)
        slots = bank.slot_of[guess]
        idle = int(np.count_nonzero(bank.pins == 0)) - int(np.count_nonzero(bank.pins[slots[slots != EMPTY]] == 0))
        lacking = guess[slots == EMPTY][: max(0, idle)]
        if not len(lacking):
            return
        missing = bank.take(lacking, guess)
        arrival = Arrival(bank, missing, missing, [bank.row(int(expert)) for expert in missing])
        try:
            arrival.batch = self._submit(layer, missing, arrival.rows)
        except BaseException:
            arrival.give_up()
            raise
        self._flying[layer] = arrival
        self._counters.prefetched += len(missing)

    def land(self, layer: int, wanted: np.ndarray) -> None:
        """Wait for the guessed reads of `layer`, so that its slots hold what they say. A failed one leaves none."""
        arrival = self._flying.get(layer)
        if arrival is None:
            return
        try:
            arrival.wait()
        except Exception:
            return
        finally:
            del self._flying[layer]
        arrival.bank.unpin(arrival.bank.slot_of[arrival.group], ())
        self._counters.prefetch_used += int(np.isin(arrival.group, wanted).sum())

    def land_all(self) -> None:
        for layer in list(self._flying):
            self.land(layer, np.zeros(0, np.int32))
