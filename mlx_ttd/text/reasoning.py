"""A model's reasoning, apart from its answer."""

from __future__ import annotations

from typing import NamedTuple

from .tagged import held_suffix

THINK, END_THINK = "<think>", "</think>"


class Split(NamedTuple):
    """A piece of a generation: its reasoning and its answer, either may be empty."""

    reasoning: str
    text: str


def opens_reasoning(prompt: str) -> bool:
    """Whether a rendered prompt ends in <think>, so that the generation begins with reasoning."""
    return prompt.rstrip().endswith(THINK)


class ReasoningSplitter:
    """Splits generated text at <think>, where it begins with that, and the first </think>; later tags are text.

    Newlines next to the two tags are layout and are dropped. inside: the prompt has already opened the block, see
    `opens_reasoning`.
    """

    def __init__(self, inside: bool = False):
        self._begun = self._inside = self._at_tag = inside
        self._held = ""

    def feed(self, text: str) -> Split:
        """The reasoning and the answer that `text` settles; a possible beginning of a tag is held back."""
        return self._split(text, last=False)

    def finish(self) -> Split:
        """What was held back at the end of the generation."""
        return self._split("", last=True)

    def _split(self, text: str, last: bool) -> Split:
        text, self._held = self._held + text, ""
        if not self._begun:
            first = text.lstrip()
            if not last and first != THINK and THINK.startswith(first):
                self._held = text
                return Split("", "")
            self._begun = True
            if first.startswith(THINK):
                self._inside = self._at_tag = True
                text = first[len(THINK) :]
        reasoning = ""
        if self._inside:
            reasoning, text = self._until_closed(self._after_tag(text), last)
        return Split(reasoning, self._after_tag(text))

    def _until_closed(self, text: str, last: bool) -> tuple[str, str]:
        """What of `text` is reasoning, and what follows the closing tag."""
        reasoning, closed, answer = text.partition(END_THINK)
        if closed:
            self._inside, self._at_tag = False, True
        elif not last:
            reasoning = reasoning[: len(reasoning) - held_suffix(reasoning, END_THINK)]
        reasoning = reasoning.rstrip("\n")
        if not closed and not last:
            self._held = text[len(reasoning) :]
        return reasoning, answer

    def _after_tag(self, text: str) -> str:
        """`text` without the newlines that follow a tag."""
        if self._at_tag:
            text = text.lstrip("\n")
            self._at_tag = not text
        return text
