"""Text from tokens that arrive one at a time, never cutting a character."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"


class Detokenizer:
    """Incremental decoding: what all `add` calls and `finish` return, joined, equals `decode` of all tokens at once.

    Bytes that are no UTF-8 may come out differently from a byte-fallback vocabulary, never from a byte-level one.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        self._decode = decode
        self._window: list[int] = []
        self._context = 0
        self._given = 0

    def add(self, token: int) -> str:
        """The text that became certain with `token`; empty while its last character still lacks bytes."""
        self._window.append(token)
        text = self._decode(self._window)
        # A trailing U+FFFD may be the first bytes of a character that the next token completes.
        settled = text.rstrip(REPLACEMENT)
        fresh = settled[self._given :]
        self._given = max(self._given, len(settled))
        if fresh and settled == text:
            # The last whole piece stays as context, for decoders that treat the start of a text differently.
            del self._window[: self._context]
            self._context = len(self._window)
            self._given = len(self._decode(self._window))
        return fresh

    def finish(self) -> str:
        """What was held back, with U+FFFD for bytes that never became a character. The decoder is empty afterwards."""
        rest = self._decode(self._window)[self._given :]
        self._window, self._context, self._given = [], 0, 0
        return rest
