"""Expert records on their way into slots."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .read_pool import Batch, NativeBatch
from .slots import SlotBank


@dataclass
class Arrival:
    """Experts `group` whose slots are pinned while the `missing` ones are being read into `rows`, in this order."""

    bank: SlotBank
    group: np.ndarray
    missing: np.ndarray
    rows: list[memoryview]
    batch: Batch | NativeBatch | None = None

    def wait(self) -> None:
        """Return when every record is in its slot. On failure nothing stays pinned and the slots are empty again."""
        if self.batch is None:
            return
        try:
            self.batch.wait()
        except BaseException:
            self.abandon()
            raise
        self._seat(len(self.missing))

    def some(self) -> np.ndarray:
        """As `wait`, for the next of `missing` and those that are there by then, where `group` is but these."""
        assert self.batch is not None
        try:
            landed = self.batch.some()
        except BaseException:
            self.abandon()
            raise
        experts = self._seat(landed)
        self.group = self.missing
        return experts

    def _seat(self, landed: int) -> np.ndarray:
        experts, self.missing = self.missing[:landed], self.missing[landed:]
        rows, self.rows = self.rows[:landed], self.rows[landed:]
        self.bank.deliver(experts, rows)
        self.bank.seat(experts)
        return experts

    def abandon(self) -> None:
        """Give up what was not begun, wait for reads in flight, since they write into slots, and unpin."""
        if self.batch is not None:
            self.batch.drain()
        self.give_up()

    def give_up(self) -> None:
        """Unpin, and forget what was to come."""
        self.bank.unpin(self.bank.slot_of[self.group], ())
        self.bank.forget(self.missing)
        self.group = self.missing = self.missing[:0]
        self.batch = None
