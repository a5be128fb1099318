"""A model's reasoning, apart from its answer."""

from __future__ import annotations

from typing import NamedTuple

from .tagged import Piece, TagSplitter

THINK, END_THINK = "<think>", "</think>"


class Split(NamedTuple):
    """A piece of a generation: its reasoning and its answer, either may be empty."""

    reasoning: str
    text: str


def opens_reasoning(prompt: str) -> bool:
    """Whether a rendered prompt ends inside a <think> block, so that the generation begins with reasoning."""
    return prompt.rfind(THINK) > prompt.rfind(END_THINK)


class ReasoningSplitter:
    """Splits generated text at <think> and </think>; newlines next to the tags are layout and are dropped.

    inside: the prompt has already opened the block, see `opens_reasoning`.
    """

    def __init__(self, inside: bool = False):
        self._tags = TagSplitter(THINK, END_THINK, inside)
        self._inside = self._at_start = inside
        self._newlines = ""

    def feed(self, text: str) -> Split:
        """The reasoning and the answer that `text` settles; a possible beginning of a tag is held back."""
        return self._split(self._tags.feed(text))

    def finish(self) -> Split:
        """What was held back at the end of the generation."""
        return self._split(self._tags.finish())

    def _split(self, pieces: list[Piece]) -> Split:
        reasoning = answer = ""
        for piece in pieces:
            if piece.inside != self._inside:
                self._inside, self._at_start = piece.inside, True
            text = piece.text
            if self._at_start:
                text = text.lstrip("\n")
                self._at_start = not text
            if not piece.inside:
                answer += text
                continue
            text = self._newlines + text
            kept = text.rstrip("\n")
            self._newlines = "" if piece.closed else text[len(kept) :]
            reasoning += kept
        return Split(reasoning, answer)
