"""What passes between a program and the process that renders its templates: frames of 8 bytes of length and a body."""

from __future__ import annotations

import json
from typing import Any

HEAD = 8
READY = b"ready"
RENDERED, REFUSED = b"+", b"-"
PAIRS = "\0"


def head_of(body: bytes) -> bytes:
    return len(body).to_bytes(HEAD, "big")


def body_length(head: bytes | bytearray) -> int:
    return int.from_bytes(head, "big")


def as_bytes(text: str) -> bytes:
    """UTF-8; a lone surrogate, which is no character, passes as it is."""
    return text.encode("utf-8", "surrogatepass")


def as_text(body: bytes | bytearray) -> str:
    return body.decode("utf-8", "surrogatepass")


def packed(values: Any) -> bytes:
    """`values`, made of JSON types, as JSON; ValueError when a number has more digits than Python prints."""
    return as_bytes(json.dumps(_with_pairs(values), ensure_ascii=False))


def unpacked(body: bytes) -> Any:
    return json.loads(as_text(body), object_hook=lambda found: dict(found[PAIRS]) if PAIRS in found else found)


def _with_pairs(value: Any) -> Any:
    """Dicts whose keys JSON would turn into strings become lists of pairs."""
    if isinstance(value, list):
        return [_with_pairs(item) for item in value]
    if not isinstance(value, dict):
        return value
    found = {key: _with_pairs(item) for key, item in value.items()}
    plain = PAIRS not in found and all(isinstance(key, str) for key in found)
    return found if plain else {PAIRS: list(found.items())}
