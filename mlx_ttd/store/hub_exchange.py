"""One question to a hub and its answer, received on a thread of its own so that each wait has an end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import Empty, Full, Queue
from threading import Event, Thread
from typing import Any

from ..errors import CheckpointError
from .hub_patience import Passing, Patience

BLOCKS, POLL_SECONDS, REASON_CHARACTERS = 4, 0.05, 200


@dataclass(frozen=True)
class Answer:
    """Status and headers (names in lower case) of an answer; `body` gives its bytes as they arrive, once."""

    status: int
    headers: Mapping[str, str]
    body: Iterator[bytes]


class _Left(Exception):
    """Nobody listens any more."""


def printable(text: object) -> str:
    """A line of what a hub said, cut and without control characters."""
    return "".join(c if c.isprintable() else " " for c in str(text)[:REASON_CHARACTERS]).strip()


def _named(failure: BaseException) -> Exception:
    """What a failure of the HTTP client means. Its two libraries share names, not classes."""
    names = [c.__name__ for c in type(failure).__mro__]
    if "LocalProtocolError" in names:  # its text quotes the header, and with it the token
        return CheckpointError("The hub cannot be asked: a header is malformed; look at the token in HF_TOKEN.")
    reason = f"{names[0]}: {printable(failure)}"
    return Passing(reason) if "TransportError" in names else CheckpointError(f"The hub cannot be asked: {reason}.")


class _Line:
    """Where the receiving thread puts status and headers, blocks, and last None or its failure."""

    def __init__(self) -> None:
        self.arrived: Queue[Any] = Queue(BLOCKS)
        self.left = Event()

    def put(self, item: Any) -> None:
        while not self.left.is_set():
            with suppress(Full):
                return self.arrived.put(item, timeout=POLL_SECONDS)
        raise _Left

    def receive(self, url: str, headers: Mapping[str, str], timeout: float) -> None:
        from huggingface_hub import get_session

        try:
            asked = get_session().stream("GET", url, headers=headers, follow_redirects=False, timeout=timeout)
            with asked as answer:
                self.put((answer.status_code, {k.lower(): v for k, v in answer.headers.items()}))
                for block in answer.iter_raw():
                    self.put(block)
            self.put(None)
        except _Left:
            pass
        except Exception as failure:
            with suppress(_Left):
                self.put(_named(failure))

    def take(self, patience: Patience, until: float) -> Any:
        """The next thing put there, or b"" when nothing came until then."""
        while True:
            patience.check()
            with suppress(Empty):
                item = self.arrived.get(timeout=POLL_SECONDS)
                if isinstance(item, Exception):
                    raise item
                return item
            if patience.clock() > until:
                return b""


def _blocks(line: _Line, patience: Patience, until: float) -> Iterator[bytes]:
    waited, found, clock = 0.0, 0, patience.clock  # time that the listener takes for itself is not the hub's
    while True:
        begin = clock()
        block = line.take(patience, min(begin + patience.window_s - waited, until))
        waited += clock() - begin
        if block is None:
            return
        found += len(block)
        if clock() > until:
            raise Passing(f"an answer that takes longer than {patience.whole_s:g} s")
        if waited >= patience.window_s:
            if found < patience.least_rate * waited:
                raise Passing(f"{found:,} bytes in {waited:.0f} s, as good as nothing")
            waited, found = 0.0, 0
        if block:
            yield block


@contextmanager
def exchange(url: str, headers: Mapping[str, str], patience: Patience) -> Iterator[Answer]:
    """Ask once, following no redirect. Raises Passing for what another try may mend, CheckpointError for the rest.

    Leaving early ends the connection.
    """
    line, begin, answered = _Line(), patience.clock(), False
    Thread(target=line.receive, args=(url, headers, patience.window_s), name="hub", daemon=True).start()
    try:
        first = line.take(patience, begin + min(patience.answer_s, patience.whole_s))
        if not first:
            raise Passing(f"no answer within {patience.answer_s:g} s")
        answered = True
        status, found = first
        yield Answer(status, found, _blocks(line, patience, begin + patience.whole_s))
    finally:
        line.left.set()
        if not answered:
            _hang_up()


def _hang_up() -> None:
    """End the connections of the client that all share, among them one whose headers never end."""
    from huggingface_hub import close_session

    close_session()
