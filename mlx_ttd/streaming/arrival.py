"""Expert records on their way into slots."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .read_pool import Batch, NativeBatch
from .slots import SlotBank


@dataclass
class Arrival:
    """Experts `group` whose slots are pinned while the `missing` ones are being read into `rows`."""

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
            self.batch.drain()
            self.give_up()
            raise
        self.bank.deliver(self.missing, self.rows)
        self.bank.seat(self.missing)

    def abandon(self) -> None:
        """Wait for reads in flight, since they write into slots, and unpin."""
        try:
            self.wait()
        except Exception:
            return
        self.bank.unpin(self.bank.slot_of[self.group], ())

    def give_up(self) -> None:
        self.bank.unpin(self.bank.slot_of[self.group], ())
        self.bank.forget(self.missing)
