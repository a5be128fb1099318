"""One generation at a time on one model, whoever asks."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from inspect import GEN_RUNNING, getgeneratorstate
from typing import Generic, TypeVar

from ..errors import BusyError

T = TypeVar("T")


class Turns:
    """Serialises the users of a model. Threads wait for their turn.

    The main thread does not wait for a generation that it began itself and left unfinished, as an interrupted notebook
    cell does: that one ends.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Weakly, so that a turn that is dropped ends.
        self._last: weakref.ref[Turn] | None = None
        self._holder: object = None
        self._process = os.getpid()
        self.stepping = threading.RLock()
        self.closed = False

    def check(self) -> None:
        """BusyError from a forked child or after close."""
        if os.getpid() != self._process:
            raise BusyError("this model was loaded before the process forked; load it again in the child.")
        if self.closed:
            raise BusyError("this model is closed; load it again.")

    def run(self, work: Generator[T, None, None]) -> Turn[T]:
        """Iterate `work`; its turn begins with the first `next`."""
        self.check()
        return Turn(self, work)

    def alone(self, work: Callable[[], T]) -> T:
        """Do `work` in a turn of its own."""
        turn = self.run(work() for _ in range(1))
        try:
            return next(turn)
        finally:
            turn.close()

    def between_steps(self, work: Callable[[], None]) -> None:
        """Do `work` unless another thread is in the middle of a step."""
        if self.stepping.acquire(blocking=False):
            try:
                work()
            finally:
                self.stepping.release()

    def begin(self, turn: Turn) -> None:
        self.check()
        current = self._current()
        if current is not None and current.thread is threading.current_thread() is threading.main_thread():
            current.close()
        self._lock.acquire()
        self._last, self._holder = weakref.ref(turn), turn.key
        try:
            self.check()
        except BusyError:
            self.end(turn)
            raise

    def end(self, turn: Turn) -> None:
        if self.holds(turn):
            self._holder = None
            self._lock.release()

    def holds(self, turn: Turn) -> bool:
        return self._holder is turn.key

    def _current(self) -> Turn | None:
        return self._last() if self._last is not None and self._holder is not None else None

    def close(self) -> None:
        """End the generation that is left unfinished and refuse new ones. BusyError in the middle of a step."""
        self.check()
        self.closed = True
        current = self._current()
        try:
            if current is not None:
                current.close()
        except BusyError:
            self.closed = False
            raise
        # Whoever has the lock now is about to find the model closed.
        with self._lock:
            pass


class Turn(Generic[T], Iterator[T]):
    """An iterator that holds its model from the first `next` until it ends, fails, is closed or dropped."""

    def __init__(self, turns: Turns, work: Generator[T, None, None]):
        self._turns, self._work, self.key = turns, work, object()
        self.thread: threading.Thread | None = None

    def __next__(self) -> T:
        if self.thread is None:
            self.thread = threading.current_thread()
            try:
                self._turns.begin(self)
            except BaseException:
                self.thread = None
                raise
        with self._turns.stepping:
            try:
                return next(self._work)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """End the generation; the model is free again. BusyError while it is in the middle of a step."""
        if getgeneratorstate(self._work) == GEN_RUNNING:
            raise BusyError("this generation is in the middle of a step; close it, or the model, after that.")
        if not self._turns.holds(self):
            self._work.close()
            return
        with self._turns.stepping:
            self._work.close()
            self._turns.end(self)

    def __del__(self) -> None:
        with suppress(BusyError, RuntimeError):
            self.close()
