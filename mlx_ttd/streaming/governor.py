"""Keeps a run from taking the machine down: banks shrink while memory is short, and the run ends before it is gone."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..errors import PressureError
from ..observe import Counters, swap_and_page_outs
from .memory import give_back, machine_memory, show_size
from .provider import ExpertProvider

MAC_SWAP = Path("/private/var/vm")
UNLIMITED = 1 << 62


@dataclass(frozen=True)
class Reading:
    """Bytes: memory that can be had without swapping, swap in use, free disk where the store or swap lies.

    A directory that is gone limits no disk.
    """

    memory: int
    swap: int
    disk: int


@dataclass(frozen=True)
class Limits:
    """What is pressure. Bytes, seconds, and the share of a run's time that looking may take.

    The banks shrink when less than `memory` is left or swap grows by `growth`. With the banks at their least, the run
    ends when less than `last_memory` is left or swap has grown by `last_growth`; and in any case when less than `disk`
    is free and the run has seen `growth` of it go. Banks grow again `calm` seconds after they last had to shrink, twice
    as long each time that proved too soon, up to `longest_calm`, as far as `room` beyond `memory` is left then
    and unless swap grew by a quarter of `growth` meanwhile.
    """

    memory: int = 100_000_000
    growth: int = 256_000_000
    last_memory: int = 40_000_000
    last_growth: int = 2_000_000_000
    disk: int = 1_000_000_000
    seconds: float = 1.0
    share: float = 0.005
    calm: float = 60.0
    longest_calm: float = 3600.0
    room: int = 400_000_000


def machine_reading(folder: Path) -> Reading:
    """What the machine says now; `folder` is the store's."""
    folders = [folder, *([MAC_SWAP] if sys.platform == "darwin" else [])]
    return Reading(machine_memory()[1], swap_and_page_outs()[0], min(_free_disk(place) for place in folders))


def _free_disk(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return UNLIMITED


class Governor:
    """Looks at the machine, through `read`, whenever `check` is called and `limits.seconds` have gone by.

    The banks of `provider` shrink to half their slots at a time, never under what one token uses, and grow to
    `granted` at most, what the budget gave them.
    """

    def __init__(
        self,
        read: Callable[[], Reading],
        provider: ExpertProvider | None,
        counters: Counters,
        limits: Limits = Limits(),
        clock: Callable[[], float] = time.monotonic,
    ):
        self._read, self._provider, self._counters = read, provider, counters
        self._limits, self._clock = limits, clock
        self._next = 0.0
        self._start: Reading | None = None
        self._swap = 0
        self.granted = 0 if provider is None else provider.slots
        self._pressed = clock()
        self._calm, self._grew = 0.0, False

    def begin(self) -> None:
        """A run starts: what swap and disk are now is nobody's fault."""
        self._start, self._next = None, 0.0

    def check(self) -> None:
        """Shrink the banks if the machine is short, or raise PressureError; grow them if it long was not.

        While a lease is open, banks stay.
        """
        now = self._clock()
        if now < self._next:
            return
        reading, limits = self._read(), self._limits
        self._next = now + max(limits.seconds, (self._clock() - now) / limits.share)
        if self._start is None:
            self._start, self._swap = reading, reading.swap
        grown, taken = reading.swap - self._start.swap, self._start.disk - reading.disk
        if reading.disk < limits.disk and taken > limits.growth:
            raise PressureError(
                f"the run was stopped because only {show_size(reading.disk)} of disk are left, {show_size(taken)} less "
                "than when it began; free some disk or lower memory=, which keeps the machine from swapping."
            )
        if reading.memory >= limits.memory and reading.swap - self._swap <= limits.growth:
            self._grow(reading, now)
            return
        self._swap, self._pressed = reading.swap, now
        if self._shrink():
            return
        if reading.memory < limits.last_memory or grown > limits.last_growth:
            raise PressureError(
                f"the run was stopped because only {show_size(max(0, reading.memory))} of memory are left and swap "
                f"grew by {show_size(max(0, grown))} while this model holds its least; close other programs or lower "
                "context=."
            )

    def _shrink(self) -> bool:
        """Whether the banks have given slots back, or will when their leases are released."""
        provider = self._provider
        if provider is None or provider.slots <= provider.store.spec.top_k:
            return False
        if not provider.lent:
            self._calm = min(2 * self._calm, self._limits.longest_calm) if self._grew else self._calm
            self._grew = False
            provider.resize(provider.slots // 2)
            give_back()
            self._counters.shrinks += 1
        return True

    def _grow(self, reading: Reading, now: float) -> None:
        """Take back what was given, or as many halves of it as fit, once the machine was calm for long enough."""
        provider, limits = self._provider, self._limits
        self._calm = max(self._calm, limits.calm)
        if provider is None or provider.slots >= self.granted or now - self._pressed < self._calm or provider.lent:
            return
        if reading.swap - self._swap > limits.growth // 4:
            return
        spare = min(reading.memory - limits.memory - limits.room, provider.ledger.free)
        slots = self.granted
        while slots > provider.slots and (slots - provider.slots) * provider.store.expert_bytes > spare:
            slots //= 2
        if slots > provider.slots:
            provider.resize(slots)
            self._counters.regrowths += 1
            self._grew = True
