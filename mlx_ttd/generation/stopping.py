"""When a generation ends: stop tokens and stop strings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ..errors import OptionError
from ..text import held_suffix

STOP_TOKENS = ("<|im_end|>", "<|endoftext|>")


def stop_ids(token_id: Callable[[str], int | None], eos_ids: Iterable[int] = ()) -> frozenset[int]:
    """The ids that end a generation: `eos_ids`, and <|im_end|> and <|endoftext|> where the vocabulary has them."""
    found = (token_id(token) for token in STOP_TOKENS)
    return frozenset({*eos_ids, *(i for i in found if i is not None)})


class StopStrings:
    """Cuts a stream of text at the first stop string, wherever the stream is cut.

    The one that ends first wins, the longest of those that end together. `stopped` is None until then.
    """

    def __init__(self, stops: str | Sequence[str] = ()):
        self.stops = (stops,) if isinstance(stops, str) else tuple(stops)
        if not all(isinstance(stop, str) and stop for stop in self.stops):
            raise OptionError(f"stop is {stops!r}; it must be a string or strings, none of them empty.")
        self.stopped: str | None = None
        self._held = ""

    def feed(self, text: str) -> str:
        """The text that is certain to come before a stop string; a possible beginning of one is held back."""
        if self.stopped is not None:
            return ""
        text = self._held + text
        matches = [(at + len(stop), at, stop) for stop in self.stops if (at := text.find(stop)) >= 0]
        if matches:
            _, at, self.stopped = min(matches)
            self._held = ""
            return text[:at]
        cut = len(text) - max((held_suffix(text, stop) for stop in self.stops), default=0)
        self._held = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        """What was held back, when the generation ended for another reason."""
        rest, self._held = self._held, ""
        return rest
