"""A sequence's whole state as plain arrays: taken, saved, loaded, put back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import StateError
from ..store import read_header
from .sequence import LayerState


@dataclass(frozen=True)
class Snapshot:
    """Copies of a state after `tokens`. `fingerprint` says what it belongs to: store digest, dtypes, version."""

    tokens: tuple[int, ...]
    layers: tuple[tuple[mx.array, ...], ...]
    fingerprint: dict[str, str]


def take(state: Sequence[LayerState], tokens: Sequence[int], fingerprint: dict[str, str]) -> Snapshot:
    """Copy `state`, so that later steps do not change the snapshot."""
    layers = tuple(tuple(layer.filled()) for layer in state)
    mx.eval(layers)
    return Snapshot(tuple(tokens), layers, fingerprint)


def put_back(snapshot: Snapshot, state: Sequence[LayerState], fingerprint: dict[str, str]) -> None:
    """Make `state` what it was. StateError where the snapshot belongs to another store, dtype or version."""
    for key, value in fingerprint.items():
        if snapshot.fingerprint.get(key) != value:
            raise StateError(
                f"the saved state was made with {key} {snapshot.fingerprint.get(key)!r}, this model has {value!r}; "
                "run the prompt again."
            )
    if len(snapshot.layers) != len(state):
        raise StateError(
            f"the saved state has {len(snapshot.layers)} layers, the model {len(state)}; run the prompt again."
        )
    for i, (layer, arrays) in enumerate(zip(state, snapshot.layers, strict=True)):
        found, wanted = [(a.shape, a.dtype) for a in arrays], layer.shapes(len(snapshot.tokens))
        if found != [(shape, a.dtype) for shape, a in zip(wanted, layer.arrays, strict=True)]:
            raise StateError(f"layer {i} of the saved state has other shapes or dtypes; it is damaged: save it again.")
    for layer, arrays in zip(state, snapshot.layers, strict=True):
        layer.restore(list(arrays), len(snapshot.tokens))
    mx.eval([layer.state for layer in state])


def save(snapshot: Snapshot, path: str | Path) -> None:
    """Write a safetensors file, whole or not at all."""
    arrays = {f"{i}.{j}": a for i, layer in enumerate(snapshot.layers) for j, a in enumerate(layer)}
    arrays["tokens"] = mx.array(snapshot.tokens, mx.int32)
    partial = Path(f"{path}.partial.safetensors")
    try:
        partial.touch()
        mx.save_safetensors(str(partial), arrays, {"fingerprint": json.dumps(snapshot.fingerprint)})
        partial.replace(path)
    except (OSError, RuntimeError, ValueError) as error:
        raise StateError(f"the state cannot be saved as {path}: {error}; name a file that can be written.") from None
    finally:
        with suppress(OSError, ValueError):
            partial.unlink()


def load(path: str | Path) -> Snapshot:
    """Read what `save` wrote. StateError on anything else."""
    read_header(Path(path), StateError)
    try:
        loaded: Any = mx.load(str(path), format="safetensors", return_metadata=True)
        arrays, metadata = loaded
        tokens = tuple(arrays.pop("tokens").tolist())
        fingerprint = dict(json.loads(metadata["fingerprint"]))
        layers: dict[int, dict[int, mx.array]] = {}
        for name, array in arrays.items():
            i, j = name.split(".")
            layers.setdefault(int(i), {})[int(j)] = array
        ordered = tuple(tuple(layers[i][j] for j in sorted(layers[i])) for i in range(len(layers)))
    except Exception as error:
        raise StateError(f"{path} is not a saved state: {error}; save it again.") from None
    return Snapshot(tokens, ordered, fingerprint)
