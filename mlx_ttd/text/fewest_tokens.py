"""How few tokens a text can have, told without cutting it into tokens, which takes up to 400 bytes a character."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

# A normalizer makes each byte of at most four: the two of U+0390 of three characters in eight, say.
COMPOSED = 4
NORMALIZERS, SPLITTERS = {"NFC", "NFD", "NFKC", "NFKD"}, {"Split", "ByteLevel", "Digits"}
LETTERS = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
# A space stands in a byte-level vocabulary as U+0120.
LETTER, WORD, WORD_BYTES = re.compile("[A-Za-z]"), re.compile("[ \u0120][A-Za-z]"), re.compile(b" [A-Za-z]")


def _steps(part: Any, name: str) -> list[dict[str, Any]]:
    """The JSON of a normalizer or pre-tokenizer, a sequence of them taken apart."""
    if part is None:
        return []
    found = json.loads(part.__getstate__())
    return found[name] if found["type"] == "Sequence" else [found]


def keeps_all(backend: tokenizers.Tokenizer) -> bool:
    """Whether every character of a text is in some token: a BPE over bytes that knows them all, and nothing removed."""
    from tokenizers import models, pre_tokenizers

    model = backend.model
    splits = _steps(backend.pre_tokenizer, "pretokenizers")
    added = backend.get_added_tokens_decoder().values()
    return (
        isinstance(model, models.BPE)
        and not model.continuing_subword_prefix
        and not model.end_of_word_suffix
        and all(model.token_to_id(byte) is not None for byte in pre_tokenizers.ByteLevel.alphabet())
        and any(step["type"] == "ByteLevel" for step in splits)
        and all(step["type"] in SPLITTERS and step.get("behavior") != "Removed" for step in splits)
        and all(step["type"] in NORMALIZERS for step in _steps(backend.normalizer, "normalizers"))
        and all(token.content.isascii() or not token.normalized for token in added)
        and not any(token.lstrip or token.rstrip for token in added)
    )


class FewestTokens:
    """A lower bound on the tokens of a text: what it holds of a kind, over the most that one token holds of it.

    0 where `backend` may drop characters or take any number of them as one token.
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        self._known = keeps_all(backend)
        tokens = backend.get_vocab(with_added_tokens=True) if self._known else {}
        self._bytes = max((len(token.encode()) for token in tokens), default=1)
        self._letters = max((len(LETTER.findall(token)) for token in tokens), default=1)
        self._words = max((len(WORD.findall(token)) for token in tokens), default=1)

    def __call__(self, text: str) -> int:
        if not self._known:
            return 0
        data = text.encode("utf-8", "surrogatepass")
        letters = len(data) - len(data.translate(None, LETTERS))
        words = sum(1 for _ in WORD_BYTES.finditer(data))
        # Each mark, or other character beyond ASCII, may make one letter another character.
        marks = len(text) - len(data.translate(None, bytes(range(128, 256))))
        bounds = (
            (len(data), COMPOSED * self._bytes),
            (letters - marks, max(1, self._letters)),
            # The space and letter where a word begins are in one token, or a token ends between them.
            (words - marks, self._words + 1),
        )
        return max(-(-count // most) for count, most in bounds)
