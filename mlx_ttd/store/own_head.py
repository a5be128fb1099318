"""A head in the files of a checkpoint whose config ties it to the embedding: a copy of that, or the model's own."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from .checkpoint import Checkpoint
from .safetensors_file import TensorInfo

PARTS = (".weight", ".scales", ".biases")
RANGE_BYTES, LOOK_BYTES = 16 << 20, 1 << 20

log = logging.getLogger("mlx_ttd")


def _parts(checkpoint: Checkpoint, module: str) -> list[TensorInfo | None]:
    """The weight, scales and biases of the module of the shortest name that ends in `module`."""
    named = [n.removesuffix(".weight") for n in checkpoint.tensors if f".{n}".endswith(f".{module}.weight")]
    path = min(named, key=len, default=None)
    return [None if path is None else checkpoint.tensors.get(path + part) for part in PARTS]


def _ranges(info: TensorInfo) -> Iterator[tuple[int, int]]:
    return ((start, min(RANGE_BYTES, info.nbytes - start)) for start in range(0, info.nbytes, RANGE_BYTES))


def _alike(checkpoint: Checkpoint, a: TensorInfo | None, b: TensorInfo | None, whole: bool) -> bool:
    if a is None or b is None:
        return a is b
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    look = min(LOOK_BYTES, a.nbytes)
    if not np.array_equal(checkpoint.peek(a, look), checkpoint.peek(b, look)):
        return False
    # Copied, since the next read may take the same room.
    return not whole or all(
        np.array_equal(checkpoint.read(a, start, n).copy(), checkpoint.read(b, start, n)) for start, n in _ranges(a)
    )


def with_own_head(checkpoint: Checkpoint, whole: bool = True) -> Checkpoint:
    """The checkpoint, untied where its config ties a head whose bytes are there and not the embedding's; that is said.

    As in transformers. whole: compare all bytes, not only the first MiB, which need no shard to be fetched.
    """
    head, embedding = (_parts(checkpoint, module) for module in ("lm_head", "embed_tokens"))
    if not checkpoint.spec.tied or head[0] is None:
        return checkpoint
    if all(_alike(checkpoint, a, b, whole) for a, b in zip(head, embedding, strict=True)):
        return checkpoint
    log.warning(
        "%s: config.json ties the head to the embedding, and %s holds other numbers; the model gets that head.",
        checkpoint.path,
        head[0].name,
    )
    return replace(checkpoint, spec=replace(checkpoint.spec, tied=False))
