"""Checkpoints as transformers writes them, and all that no other importer recognises."""

from __future__ import annotations

from ..checkpoint import Checkpoint
from .base import Importer
from .names import MOVES, PATHS


def _recognises(_: Checkpoint) -> bool:
    return True


HF = Importer("hf", _recognises, PATHS, MOVES)
