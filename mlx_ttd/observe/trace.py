"""A run written down: what every layer made of every token, with a digest a row.

On disk a trace is a directory: `trace.json` (format, version, producer, store digest, token ids, layers, digest) and
`trace.safetensors`, one tensor per quantity named "<layer>.<quantity>" with a row a token: gdn or attention (what the
mixer added), router.ids int32, router.weights f32, experts (what the feed-forward added), hidden; and "embedding" and
"logits" without a layer. The digest is the SHA-256 of names, dtypes, shapes and bytes in sorted order of names.
"""

from __future__ import annotations

import hashlib
import json
import operator
import os
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from ..errors import ConfigError, StoreError
from ..spec import open_regular, read_json, require_regular, user_path
from .probe import MODEL

FORMAT, VERSION = "mlx_ttd trace", 1
HEADER_BYTES, MOST_LAYERS = 64 << 20, 4096
DTYPES = (np.dtype(np.float32), np.dtype(np.int32))
QUANTITIES = ("embedding", "gdn", "attention", "router.ids", "router.weights", "experts", "hidden", "logits")


def tensor_name(layer: int, quantity: str) -> str:
    return quantity if layer == MODEL else f"{layer}.{quantity}"


@dataclass(frozen=True)
class Trace:
    """Arrays by name, a row a token. producer: "mlx_ttd" or what else ran the model."""

    producer: str
    store: str
    tokens: tuple[int, ...]
    layers: int
    arrays: dict[str, np.ndarray]

    @property
    def digest(self) -> str:
        total = hashlib.sha256()
        for name in sorted(self.arrays):
            array = np.ascontiguousarray(self.arrays[name])
            total.update(f"{name}|{array.dtype.str}|{array.shape}|".encode())
            total.update(array.tobytes())
        return total.hexdigest()

    def save(self, folder: str | Path) -> None:
        """Write the directory `folder`, which must not hold a trace yet."""
        folder = user_path(folder)
        make_trace_folder(folder)
        header = {
            "format": FORMAT,
            "version": VERSION,
            "producer": self.producer,
            "store": self.store,
            "tokens": list(self.tokens),
            "layers": self.layers,
            "digest": self.digest,
        }
        arrays = {name: np.ascontiguousarray(array) for name, array in self.arrays.items()}
        try:
            with suppress(FileNotFoundError):
                os.close(open_regular(folder / "trace.safetensors"))
            save_file(arrays, folder / "trace.safetensors")
            (folder / "trace.json").write_text(json.dumps(header, indent=1) + "\n")
        except (OSError, SafetensorError) as error:
            raise StoreError(f"the trace cannot be written to {folder}: {error}; name another directory.") from None


def make_trace_folder(folder: Path) -> None:
    """Make the directory of a trace. StoreError where that cannot be, or where it holds a trace already."""
    folder = user_path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        taken = os.path.lexists(folder / "trace.json")
    except (OSError, ValueError) as error:
        raise StoreError(f"{folder} cannot be made a directory for a trace: {error}; name another one.") from None
    if taken:
        raise StoreError(f"{folder} holds a trace already; name another directory.")


def load_trace(folder: str | Path) -> Trace:
    """Read what `Trace.save` wrote. StoreError where it is none, of another version, or damaged."""
    folder = user_path(folder)
    try:
        require_regular(folder / "trace.safetensors", StoreError)
        header = read_json(folder / "trace.json", HEADER_BYTES)
        if (header["format"], header["version"]) != (FORMAT, VERSION):
            raise ValueError(f"it is {header['format']!r} version {header['version']!r}")
        trace = Trace(
            str(header["producer"]),
            str(header["store"]),
            tuple(operator.index(token) for token in header["tokens"]),
            operator.index(header["layers"]),
            load_file(folder / "trace.safetensors"),
        )
        _check(trace)
        if trace.digest != header["digest"]:
            raise ValueError("its digest does not match")
    except (OSError, ValueError, KeyError, TypeError, ConfigError, SafetensorError) as error:
        raise StoreError(f"{folder} is not a trace that can be read: {error}; record it again.") from None
    return trace


def _check(trace: Trace) -> None:
    """ValueError unless there is a row a token and at most `MOST_LAYERS` layers."""
    if not 0 <= trace.layers <= MOST_LAYERS:
        raise ValueError(f"it has {trace.layers} layers")
    for name, array in trace.arrays.items():
        if array.ndim != 2 or len(array) != len(trace.tokens) or not array.size or array.dtype not in DTYPES:
            raise ValueError(f"{name} is {array.dtype} {list(array.shape)} where {len(trace.tokens)} tokens have a row")


@dataclass
class Recorder:
    """A probe that keeps rows of the traced quantities, prefilled and decoded ones alike."""

    rows: defaultdict[str, list[np.ndarray]] = field(default_factory=lambda: defaultdict(list))

    def note(self, layer: int, name: str, arrays: tuple[mx.array, ...]) -> None:
        if name in QUANTITIES:
            array = arrays[0] if arrays[0].dtype == mx.int32 else arrays[0].astype(mx.float32)
            self.rows[tensor_name(layer, name)].append(np.array(array))

    def trace(self, producer: str, store: str, tokens: Sequence[int], layers: int) -> Trace:
        """What was recorded since the recorder was made."""
        arrays = {name: np.concatenate(rows) for name, rows in self.rows.items()}
        return Trace(producer, store, tuple(tokens), layers, arrays)
