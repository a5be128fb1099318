"""A live sequence written to a safetensors file: tokens, arrays window by window, and a digest of both."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

import mlx.core as mx
import numpy as np

from ..errors import StateError
from ..store import make_header, sync_directory
from .sequence import LayerState
from .windows import read_window, require_finite, windows

TOKENS, FINGERPRINT, DIGEST = "tokens", "fingerprint", "sha256"
DTYPES = {mx.float32: "F32", mx.bfloat16: "BF16", mx.float16: "F16", mx.uint32: "U32"}


def arrays_of(state: Sequence[LayerState], tokens: int) -> dict[str, tuple[mx.array, tuple[int, ...]]]:
    """Arrays by their names in a file, with the shape of the part that is saved after so many tokens."""
    return {
        f"{i}.{j}": (array, shape)
        for i, layer in enumerate(state)
        for j, (array, shape) in enumerate(zip(layer.arrays, layer.shapes(tokens), strict=True))
    }


def save(path: str | Path, state: Sequence[LayerState], tokens: Sequence[int], fingerprint: dict[str, str]) -> None:
    """Write the state after `tokens`, whole and durable or not at all. `fingerprint` says what it belongs to.

    No step may run meanwhile. StateError where it cannot be written, or where a step was cut short.
    """
    if not tokens or any(layer.offset != len(tokens) for layer in state):
        raise StateError("there is no whole sequence to save; generate something first.")
    partial = None
    try:
        target = _target(path)
        partial = Path(f"{target}.{token_hex(4)}.partial")
        _write(partial, state, tokens, fingerprint)
        partial.replace(target)
        sync_directory(target.parent)
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise StateError(f"the state cannot be saved as {path}: {reason}; name a file that can be written.") from None
    finally:
        if partial is not None:
            with suppress(OSError):
                partial.unlink()


def _target(path: str | Path) -> Path:
    """Where a link leads. OSError unless a plain file, or none yet, is there."""
    target = Path(os.path.realpath(os.path.expanduser(path)))
    if not target.parent.is_dir():
        raise OSError(0, f"{target.parent} is no folder")
    if target.exists() and not stat.S_ISREG(target.stat().st_mode):
        raise OSError(0, "something that is no plain file has that name")
    return target


def _write(path: Path, state: Sequence[LayerState], tokens: Sequence[int], fingerprint: dict[str, str]) -> None:
    arrays = arrays_of(state, len(tokens))
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {TOKENS: ("I32", (len(tokens),))}
    tensors |= {name: (DTYPES[array.dtype], shape) for name, (array, shape) in arrays.items()}
    metadata = {FINGERPRINT: json.dumps(fingerprint), DIGEST: "0" * 64}
    digest = hashlib.sha256()
    with open(path, "xb") as file:
        file.write(make_header(path, tensors, metadata=metadata).raw)
        for block in _blocks(arrays, tokens):
            digest.update(block)
            file.write(block)
        file.seek(0)
        file.write(make_header(path, tensors, metadata=metadata | {DIGEST: digest.hexdigest()}).raw)
        file.flush()
        os.fsync(file.fileno())


def _blocks(arrays: dict[str, tuple[mx.array, tuple[int, ...]]], tokens: Sequence[int]) -> Iterator[memoryview]:
    yield np.array(tokens, "<i4").data.cast("B")
    for name, (array, shape) in arrays.items():
        for window in windows(shape, array.itemsize):
            words = read_window(array, window)
            require_finite(words, array.dtype, f"array {name} of the state")
            yield words.data.cast("B")
