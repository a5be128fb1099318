"""The kinds of checkpoint that can be converted, each in one file; the first that recognises one imports it."""

from ..checkpoint import Checkpoint
from .base import Importer, Move, Rows
from .hf import HF
from .mlx import MLX

IMPORTERS = (MLX, HF)


def importer_for(checkpoint: Checkpoint) -> Importer:
    """The importer of a checkpoint."""
    return next(importer for importer in IMPORTERS if importer.recognises(checkpoint))


__all__ = ["IMPORTERS", "Importer", "Move", "Rows", "importer_for"]
