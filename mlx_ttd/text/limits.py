"""How much a chat template may make and take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """What a template, which is untrusted, may use: characters that it makes, and seconds."""

    characters: int = 16_000_000
    seconds: float = 20.0


DEFAULT_LIMITS = Limits()
