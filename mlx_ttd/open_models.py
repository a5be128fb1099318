"""The models that are open in this process, so that a notebook's load cell, run again, replaces the one it made."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from weakref import WeakSet

from .errors import BusyError
from .session.llm import LLM

_open: WeakSet[LLM] = WeakSet()


def note_open(llm: LLM) -> LLM:
    """Remember a model for as long as somebody holds it."""
    _open.add(llm)
    return llm


def close_open(store: Path, keep: LLM | None = None) -> None:
    """Close every open model of a store but `keep`."""
    for llm in [one for one in _open if one is not keep and one.store.path.resolve() == store.resolve()]:
        with suppress(BusyError):
            llm.close()
