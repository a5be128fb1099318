"""Splitting a stream of text at a pair of tags, wherever the stream is cut."""

from __future__ import annotations

from dataclasses import dataclass


def held_suffix(text: str, mark: str) -> int:
    """How many characters at the end of `text` may be the beginning of `mark`."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)


@dataclass(frozen=True)
class Piece:
    """Text from inside or outside the tags; `closed` when the closing tag follows it."""

    text: str
    inside: bool
    closed: bool = False


class TagSplitter:
    """Tells text between `start` and `end` from text outside; the tags themselves are dropped."""

    def __init__(self, start: str, end: str):
        self._start, self._end = start, end
        self._inside = False
        self._held = ""

    @property
    def inside(self) -> bool:
        """Whether the opening tag was the last seen."""
        return self._inside

    def feed(self, text: str) -> list[Piece]:
        """The pieces that `text` settles; a possible beginning of a tag is held back."""
        pieces = []
        text = self._held + text
        while (at := text.find(mark := self._end if self._inside else self._start)) >= 0:
            pieces.append(Piece(text[:at], self._inside, closed=self._inside))
            text, self._inside = text[at + len(mark) :], not self._inside
        cut = len(text) - held_suffix(text, mark)
        self._held = text[cut:]
        pieces.append(Piece(text[:cut], self._inside))
        return [piece for piece in pieces if piece.text or piece.closed]

    def finish(self) -> list[Piece]:
        """What was held back."""
        rest, self._held = self._held, ""
        return [Piece(rest, self._inside)] if rest else []
