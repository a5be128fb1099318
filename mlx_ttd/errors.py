"""Every exception a user can meet, all from `TTDError`; each message says what is wrong, where, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Collection

LONGEST = 3000


def known_names(name: str, known: Collection[str], most: int) -> str:
    """What to say of an unknown name: up to `most` known ones that are like it, or all."""
    near = difflib.get_close_matches(name, known, most)
    return f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(known)}."


class TTDError(Exception):
    """Base of every error that mlx_ttd raises on purpose. A message that quotes too much is cut in the middle."""

    def __str__(self) -> str:
        text = super().__str__()
        return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} [...] {text[-LONGEST // 2 :]}"


class ConfigError(TTDError):
    """A model configuration that is missing, malformed or of an unknown `model_type`."""


class OptionError(TTDError):
    """An option, environment variable or argument that is unknown, of the wrong type or out of range."""


class CheckpointError(TTDError):
    """A source checkpoint whose tensors do not match its configuration."""


class StoreError(TTDError):
    """A store that is missing, damaged, unsafe or of a newer format version."""


class RecordError(StoreError):
    """An expert record that could not be read whole or does not match its digest."""


class ConversionError(TTDError):
    """A conversion that cannot start or finish: the destination exists, no disk space, a failing write."""


class BudgetError(TTDError):
    """A memory budget that cannot hold what is asked. `least_bytes` is the smallest budget that works."""

    def __init__(self, message: str, least_bytes: int | None = None):
        super().__init__(message)
        self.least_bytes = least_bytes


class PressureError(TTDError):
    """A run that was stopped because the machine has no memory or disk left; what it generated so far stands."""


class LeaseError(TTDError):
    """Slots that are all pinned by unreleased leases."""


class ContextError(TTDError):
    """A prompt or continuation longer than the context that memory was reserved for."""


class TokenizerError(TTDError):
    """Tokenizer files that are missing or malformed, or text that cannot be encoded."""


class TemplateError(TTDError):
    """A chat template that is missing, unsafe, too large, or that raised."""


class StateError(TTDError):
    """A saved sequence state that does not belong to this store, dtype or library version."""


class KernelError(TTDError):
    """A kernel asked for with a dtype, shape, format or backend it does not have."""


class BusyError(TTDError):
    """A model that is used by two callers at once, from a forked child, or after it was closed."""
