"""Which call uses the experts of a model: one at a time, and what an interrupted one left is put right by the next."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

import numpy as np

from ..errors import BusyError

if TYPE_CHECKING:
    from .arrival import Arrival
    from .slots import SlotBank

HOLDER = "holder"


class Call:
    """What one call of a thread took: `bank` as it was before, and its reads. engine: nothing ever interrupts it."""

    def __init__(self, frame: FrameType, bank: SlotBank | None, engine: bool):
        self.thread = threading.get_ident()
        self.frame, self.code = id(frame), frame.f_code
        self.engine, self.bank = engine, bank
        self.pins = None if bank is None else bank.pins.copy()
        self.arrivals: list[Arrival] = []
        self.takers = [None]

    def goes_on(self) -> bool:
        """Whether its frame is still on its thread's stack, which an interrupt ends without a word."""
        own = self.thread == threading.get_ident()
        frame = sys._getframe() if own else sys._current_frames().get(self.thread)
        while frame is not None:
            if frame.f_code is self.code and id(frame) == self.frame:
                return True
            frame = frame.f_back
        return False

    def put_right(self) -> None:
        """Undo what it left behind. Doing so twice, or again after an interrupt, is as well as once."""
        for arrival in self.arrivals:
            if arrival.batch is not None:
                arrival.batch.drain()
        if self.bank is not None and self.pins is not None:
            self.bank.put_right(self.pins)


class Claims:
    """The call that goes on, if any. Setting and dropping it are single steps of the interpreter."""

    def __init__(self) -> None:
        self._held: dict[str, Call] = {}

    @property
    def current(self) -> Call | None:
        return self._held.get(HOLDER)

    def begin(self, frame: FrameType, bank: SlotBank | None, engine: bool = False) -> Call | None:
        """The record of a new call that `frame` runs; None within one of the same thread that goes on.

        BusyError while one of another thread goes on.
        """
        going = self._held.get(HOLDER)
        if going is not None and going.engine and going.thread == threading.get_ident():
            return None
        mine = Call(frame, bank, engine)
        holder = self._held.setdefault(HOLDER, mine)
        if holder is mine:
            return mine
        if holder.goes_on():
            if holder.thread == mine.thread:
                return None
            raise BusyError("another thread uses the experts of this model just now; let one finish before the other.")
        try:
            # Whoever takes this puts right what was left.
            holder.takers.pop()
        except IndexError:
            raise BusyError("another thread puts right what an interrupt left of this model; call again.") from None
        try:
            holder.put_right()
            mine.pins = None if bank is None else bank.pins.copy()
            self._held[HOLDER] = mine
        except BaseException:
            holder.takers.append(None)
            raise
        return mine

    def end(self, call: Call | None) -> None:
        if call is not None and self._held.get(HOLDER) is call:
            del self._held[HOLDER]


class Using:
    """A block in which the frame that opened it has the claim."""

    def __init__(self, claims: Claims, on_begin: Callable[[], None]):
        self._claims, self._on_begin = claims, on_begin
        self._call: Call | None = None

    def __enter__(self) -> None:
        self._call = self._claims.begin(sys._getframe(1), None, engine=True)
        if self._call is not None:
            try:
                self._on_begin()
            except BaseException:
                self._claims.end(self._call)
                raise

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._claims.end(self._call)


def rebuilt(expert_in: np.ndarray, experts: int, empty: int) -> np.ndarray:
    """Slot of each expert, int32 [experts], from the experts that sit in the slots, int32 [slots]."""
    slot_of = np.full(experts, empty, np.int32)
    taken = np.flatnonzero(expert_in != empty)
    slot_of[expert_in[taken]] = taken
    return slot_of
