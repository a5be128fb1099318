"""One generation at a time on one model, whoever asks."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
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
        self._current: Turn | None = None
        self._process = os.getpid()
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

    def begin(self, turn: Turn) -> None:
        self.check()
        current = self._current
        if current is not None and current.in_main_thread and threading.current_thread() is threading.main_thread():
            current.close()
        self._lock.acquire()
        self._current = turn

    def end(self, turn: Turn) -> None:
        if self._current is turn:
            self._current = None
            self._lock.release()

    def close(self) -> None:
        """End the running generation, if it is this thread's to end, and refuse new ones."""
        self.check()
        if self._current is not None:
            self._current.close()
        self.closed = True


class Turn(Generic[T], Iterator[T]):
    """An iterator that holds its model from the first `next` until it ends, fails, is closed or dropped."""

    def __init__(self, turns: Turns, work: Generator[T, None, None]):
        self._turns, self._work = turns, work
        self._begun = False
        self.in_main_thread = False

    def __next__(self) -> T:
        if not self._begun:
            self._turns.begin(self)
            self._begun = True
            self.in_main_thread = threading.current_thread() is threading.main_thread()
        try:
            return next(self._work)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the generation; the model is free again."""
        self._work.close()
        if self._begun:
            self._turns.end(self)

    def __del__(self) -> None:
        with suppress(ValueError, RuntimeError):
            self.close()
