"""How long a hub is waited for: until an answer starts, while its bytes trickle, and between one try and the next."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event

from ..errors import CheckpointError

TRIES, FIRST_TRIES = 8, 4
FIRST_WAIT, LONGEST_WAIT, LONGEST_ASKED_WAIT = 1.0, 60.0, 300.0
ANSWER_SECONDS, WINDOW_SECONDS, LEAST_RATE = 30.0, 20.0, 32 << 10
PROGRESS_BYTES = 1 << 20


class Passing(Exception):
    """A failure that may pass, such as a busy server; `wait` is how many seconds the hub asks to wait, if it does."""

    def __init__(self, reason: str, wait: float | None = None):
        super().__init__(reason)
        self.wait = wait


@dataclass(frozen=True)
class Patience:
    """An answer must start within `answer_s` and bring `least_rate` bytes a second over each `window_s`, else the try
    failed; after `tries` in a row without progress the reading ends. `stopped` ends every wait.
    """

    tries: int = TRIES
    answer_s: float = ANSWER_SECONDS
    window_s: float = WINDOW_SECONDS
    whole_s: float = float("inf")
    least_rate: int = LEAST_RATE
    stopped: Event = field(default_factory=Event)
    pause: Callable[[float], object] | None = None
    clock: Callable[[], float] = time.monotonic

    def check(self) -> None:
        """Raise CheckpointError once the reading is to end."""
        if self.stopped.is_set():
            raise CheckpointError("Reading from the hub was stopped; the same command goes on from there.")

    def wait(self, seconds: float) -> None:
        """Sleep, but no longer than until `stopped`."""
        (self.pause or self.stopped.wait)(seconds)
        self.check()


class Tries:
    """The failures in a row of one piece of work, `what` for people."""

    def __init__(self, what: str, patience: Patience):
        self.what, self.patience, self.failures = what, patience, 0

    def failed(self, failure: Passing, progress: int = 0) -> float:
        """Seconds to wait until the next try, after one that brought `progress` bytes; CheckpointError for no more."""
        self.failures = 1 if progress >= PROGRESS_BYTES else self.failures + 1
        if failure.wait is not None and failure.wait > LONGEST_ASKED_WAIT:
            raise CheckpointError(
                f"{self.what} could not be read from the hub, which asks to wait {failure.wait:,.0f} s ({failure}); "
                "run the same command again then: what was converted and fetched is kept, and it resumes there."
            )
        if self.failures >= self.patience.tries:
            raise CheckpointError(
                f"{self.what} could not be read from the hub in {self.failures} tries ({failure} in the last); run the "
                "same command again later: what was converted and fetched is kept, and it resumes there."
            )
        backoff = min(LONGEST_WAIT, FIRST_WAIT * 2 ** (self.failures - 1)) * random.uniform(0.5, 1)
        return backoff if failure.wait is None else failure.wait + random.random()
