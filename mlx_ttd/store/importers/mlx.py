"""Checkpoints as mlx-lm writes them, quantised or not. Each layout is read from either kind; the name is a record."""

from __future__ import annotations

from ..checkpoint import Checkpoint
from .base import Importer
from .names import CONV, MOVES, PATHS


def _recognises(checkpoint: Checkpoint) -> bool:
    convs = [info for name, info in checkpoint.tensors.items() if name.endswith(CONV)]
    return any(len(info.shape) == 3 and info.shape[2] == 1 for info in convs) or (
        not convs and "quantization" in checkpoint.config
    )


MLX = Importer("mlx", _recognises, PATHS, MOVES)
