"""Bytes of a hub: never more than were asked, from where the last try stopped, and the token for the hub alone."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar
from urllib.parse import quote, urljoin, urlsplit

from .._version import __version__
from ..errors import CheckpointError
from .hub_exchange import Answer, exchange
from .hub_patience import Passing, Patience, Tries
from .hub_refusal import refusal

REDIRECTS = 5
RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)")
TOTAL = re.compile(r"bytes (?:\d{1,18}-\d{1,18}|\*)/(\d{1,18})")
PORTS = {"http": 80, "https": 443}

log = logging.getLogger(__name__)

T = TypeVar("T")


def redirected(url: str, target: str, headers: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """Where `target` leads from `url`, and the headers to take there: to another host or port, no token."""
    try:
        new, old = urlsplit(urljoin(url, target)), urlsplit(url)
        places = [(p.hostname, p.port or PORTS.get(p.scheme, 0)) for p in (new, old)]
    except ValueError:
        raise CheckpointError("The hub redirects to an address that is none; try again later.") from None
    if new.scheme not in PORTS or not new.hostname or (old.scheme == "https" and new.scheme == "http"):
        raise CheckpointError(f"The hub redirects to {new.scheme[:20]!r}, which is not as safe as {old.scheme!r}.")
    same = places[0] == places[1] and new.scheme == old.scheme
    return new.geturl(), {k: v for k, v in headers.items() if same or k.lower() not in ("authorization", "cookie")}


@contextmanager
def _followed(url: str, headers: Mapping[str, str], patience: Patience) -> Iterator[Answer]:
    for _ in range(REDIRECTS + 1):
        with exchange(url, headers, patience) as answer:
            target = answer.headers.get("location")
            if answer.status not in (301, 302, 303, 307, 308) or not target:
                yield answer
                return
        url, headers = redirected(url, target, headers)
    raise CheckpointError(f"The hub redirects more than {REDIRECTS} times; try again later.")


def _login() -> dict[str, str]:
    from huggingface_hub import constants, get_token  # its own headers ask the hub for more, without a bound

    token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
    return {} if token is None else {"Authorization": f"Bearer {token}"}


@dataclass(frozen=True)
class Remote:
    """A repository on the hub, at a revision (the default branch when None), and the patience with it."""

    repo: str
    revision: str | None
    patience: Patience = field(default_factory=Patience)

    def _refuse(self, answer: Answer, what: str) -> Exception:
        from huggingface_hub import constants

        return refusal(answer, self.repo, what, self.revision, constants.ENDPOINT)

    @contextmanager
    def _asked(self, url: str, what: str, extra: Mapping[str, str], statuses: tuple[int, ...]) -> Iterator[Answer]:
        """The answer of the last address that `url` leads to, with a status of `statuses` and not encoded."""
        headers = {"User-Agent": f"mlx_ttd/{__version__}", "Accept-Encoding": "identity", **_login(), **extra}
        with _followed(url, headers, self.patience) as answer:
            if answer.status not in statuses:
                raise self._refuse(answer, what)
            if (encoding := answer.headers.get("content-encoding", "identity")) != "identity":
                raise CheckpointError(
                    f"The hub answers {what} of {self.repo} encoded ({encoding[:20]!r}), which was not asked; "
                    "is there a proxy on the way?"
                )
            yield answer

    def _address(self, name: str) -> str:
        from huggingface_hub import hf_hub_url

        return hf_hub_url(self.repo, name, revision=self.revision)

    def blocks(self, name: str, start: int, stop: int | None, size: int) -> Iterator[bytes]:
        """Bytes [start, stop), or all from `start` on, of a file of `size`, in blocks as they arrive.

        Tried again from where a try stopped.
        """
        whole = (start, stop) == (0, None)
        at, stop, tries = start, size if stop is None else stop, Tries(f"{name} of {self.repo}", self.patience)
        while at < stop:
            before = at
            try:
                for block in self._part(name, at, stop, size, whole and not at):
                    at += len(block)
                    yield block
            except Passing as failure:
                if at < stop:
                    _pause(tries, failure, at - before)

    def _part(self, name: str, start: int, stop: int, size: int, whole: bool) -> Iterator[bytes]:
        """As many of the bytes as one answer brings. Raises Passing where these are too few."""
        extra = {} if whole else {"Range": f"bytes={start}-{stop - 1}"}
        with self._asked(self._address(name), name, extra, (200, 206)) as answer:
            end = stop if whole and answer.status == 200 else self._end(answer, name, start, stop, size)
            if (stated := answer.headers.get("content-length", str(end - start))) != str(end - start):
                raise CheckpointError(
                    f"The hub answers {end - start:,} bytes of {name} of {self.repo} with {stated[:20]}; "
                    "the file there is not the one that it lists."
                )
            for block in answer.body:
                if len(block) > end - start:
                    raise CheckpointError(
                        f"The hub sends more of {name} of {self.repo} than was asked; try again later."
                    )
                start += len(block)
                yield block
        if start < stop:
            raise Passing(f"an answer that ends {stop - start:,} bytes early")

    def _end(self, answer: Answer, name: str, start: int, stop: int, size: int) -> int:
        """Where the bytes of an answer end that starts where it was asked to."""
        stated = answer.headers.get("content-range", "none")
        found = RANGE.fullmatch(stated)
        first, last, total = found.groups() if found and answer.status == 206 else ("0", "0", "")
        if int(first) == start <= int(last) < stop and total in ("*", str(size)):
            return int(last) + 1
        raise CheckpointError(
            f"The hub answers bytes {start}-{stop - 1}/{size} of {name} of {self.repo} with HTTP {answer.status} and "
            f"range {stated[:60]!r}; it, or a proxy on the way, does not serve ranges."
        )

    def size_of(self, name: str) -> int | None:
        """The bytes of a file by the total that comes with a range of it; None where the hub does not tell."""

        def ask() -> int | None:
            with self._asked(self._address(name), name, {"Range": "bytes=0-0"}, (200, 206, 416)) as answer:
                found = TOTAL.fullmatch(answer.headers.get("content-range", ""))
                length = answer.headers.get("content-length", "")
                if found:
                    return int(found[1])
                return int(length) if answer.status == 200 and re.fullmatch(r"\d{1,18}", length) else None

        return self._patiently(f"{name} of {self.repo}", ask)

    def description(self, limit: int) -> bytes:
        """What the hub says of the repository, as JSON of at most `limit` bytes."""
        from huggingface_hub import constants

        end = "" if self.revision is None else f"/revision/{quote(self.revision, safe='')}"
        address = f"{constants.ENDPOINT}/api/models/{self.repo}{end}?blobs=true"

        def ask() -> bytes:
            found = bytearray()
            with self._asked(address, "its list of files", {}, (200,)) as answer:
                for block in answer.body:
                    found += block
                    if len(found) > limit:
                        raise CheckpointError(
                            f"The hub describes {self.repo} in more than {limit:,} bytes; name another repository."
                        )
            return bytes(found)

        return self._patiently(self.repo, ask)

    def _patiently(self, what: str, ask: Callable[[], T]) -> T:
        tries = Tries(what, self.patience)
        while True:
            try:
                return ask()
            except Passing as failure:
                _pause(tries, failure)


def _pause(tries: Tries, failure: Passing, progress: int = 0) -> None:
    seconds = tries.failed(failure, progress)
    log.warning("%s: the hub gave %s; trying again in %.0f s", tries.what, failure, seconds)
    tries.patience.wait(seconds)
