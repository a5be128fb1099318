"""How much a chat template may make and take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """What a template, which is untrusted, may use: characters that it makes, seconds, and bytes of memory."""

    characters: int = 16_000_000
    seconds: float = 20.0
    memory: int = 256 << 20


DEFAULT_LIMITS = Limits()
