"""Whether a checkpoint's norms hold w or 1 + w: told from their values, which its makers' marks must not contradict."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from ..errors import CheckpointError
from .checkpoint import Checkpoint
from .encodings import Plain
from .format import Norms
from .quantise import numbers
from .source import Source

# A weight below -1 turns its channel's sign, which training hardly does; 1 + w below 0 is the same.
TURNED = 0.01


def _stated(checkpoint: Checkpoint) -> Norms | None:
    """What the checkpoint's maker stores: mlx-lm 1 + w, transformers w; None without a mark, or with both."""
    mlx = "mlx" in checkpoint.formats or "quantization" in checkpoint.config
    torch = "pt" in checkpoint.formats
    return None if mlx == torch else "1+w" if mlx else "w"


def _centre(values: list[np.ndarray]) -> float:
    """The median over the norms of the median of each."""
    return float(np.median([np.median(v) for v in values]))


def _shown(values: list[np.ndarray]) -> Norms | None:
    """What the values are; None where they could be either, or are neither."""
    centre, negative = _centre(values), float(np.mean(np.concatenate(values) < 0))
    if 0.5 < centre < 1.5 and negative < TURNED:
        return "1+w"
    return "w" if -1 < centre < 0.5 and (negative >= TURNED or centre < 0.25) else None


def _values(checkpoint: Checkpoint, sources: Iterable[Source]) -> list[np.ndarray]:
    found = []
    for source in sources:
        encoding, (rows,) = source.encoding, source.rows
        assert isinstance(encoding, Plain)
        info = checkpoint.tensors[rows.name]
        found.append(numbers(checkpoint.peek(info, info.nbytes), encoding.dtype))
    return found


def norms_of(checkpoint: Checkpoint, sources: Mapping[str, Source]) -> Norms:
    """Read every norm that has the 1 + (the gated norm never does). CheckpointError where it cannot be told."""
    norms = [source for source in sources.values() if source.tensor.kind == "norm"]
    trunk = _values(checkpoint, (s for s in norms if not s.tensor.name.startswith("mtp.")))
    mtp = _values(checkpoint, (s for s in norms if s.tensor.name.startswith("mtp.")))
    shown, stated = _shown(trunk), _stated(checkpoint)
    where, settle = f"{checkpoint.path}: the norms' values centre on {_centre(trunk):.2f}", "say norms='w' or '1+w'"
    found = shown or stated
    if found is None or not -1 < _centre(trunk) < 1.5:
        raise CheckpointError(f"{where}, which is neither w (near 0) nor 1 + w (near 1); {settle}.")
    if stated not in (None, found):
        raise CheckpointError(f"{where}, as of norms stored as {found}, and its maker's marks mean {stated}; {settle}.")
    if mtp and _shown(mtp) not in (None, found):
        raise CheckpointError(f"{where}, and those of its MTP layer on {_centre(mtp):.2f}; they must be stored alike.")
    return found
