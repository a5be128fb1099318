"""A saved state read back: every claim checked against the model before the live sequence is given up."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import mlx.core as mx
import numpy as np

from ..errors import ContextError, StateError
from ..store import Header, parse_header
from .keys_values import KVState
from .saving import DIGEST, DTYPES, FINGERPRINT, TOKENS, arrays_of
from .sequence import LayerState
from .windows import Window, require_finite, window_shape, windows, write_window

HEADER_BYTES = 1 << 20
Take = Callable[[str, Window, np.ndarray], None]


@dataclass(frozen=True)
class SavedState:
    """An open file whose every byte was found good. tokens: those that the state has seen."""

    file: BinaryIO
    header: Header
    digest: str | None
    tokens: list[int]

    def fill(self, empty: Sequence[LayerState]) -> None:
        """Be that state. StateError where the file cannot be read any more; then `empty` is to be dropped."""
        arrays = arrays_of(empty, len(self.tokens))

        def take(name: str, window: Window, words: np.ndarray) -> None:
            write_window(arrays[name][0], window, words)

        mx.eval([layer.arrays for layer in empty])
        self.read(arrays, take)
        for layer in empty:
            layer.offset = len(self.tokens)

    def read(self, arrays: Mapping[str, tuple[mx.array, tuple[int, ...]]], take: Take) -> None:
        """Pass every array through `take`, a window at a time. StateError for damage that it shows."""
        path, digest = self.header.path, hashlib.sha256(np.array(self.tokens, "<i4").tobytes())
        for name, (array, shape) in arrays.items():
            self.file.seek(self.header.tensors[name].offset)
            for window in windows(shape, array.itemsize):
                words = np.empty(window_shape(shape, window), f"<u{array.itemsize}")
                _fill(self.file, words, path)
                require_finite(words, array.dtype, f"{path}: array {name}")
                digest.update(words.data)
                take(name, window, words)
        if self.digest is not None and digest.hexdigest() != self.digest:
            raise StateError(f"{path} does not match its digest; it is damaged: save it again.")


@contextmanager
def saved_state(
    path: str | Path, empty: Sequence[LayerState], fingerprint: Mapping[str, str], vocab: int
) -> Iterator[SavedState]:
    """The file that `save` wrote, read through once and found to fit `empty`, of which no array need be evaluated.

    StateError for anything else than a state of this store, dtype and version; ContextError where it is too long.
    """
    place = Path(os.path.expanduser(path))
    try:
        # Without O_NONBLOCK a pipe would be waited for.
        with open(place, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise StateError(f"{path} is no plain file; name one that save_state wrote.")
            header = parse_header(place, found.st_size, lambda n: _head(file, n, place), StateError)
            metadata = _metadata(header)
            _require_fingerprint(metadata, fingerprint)
            tokens = _tokens(file, header, empty, vocab)
            saved = SavedState(file, header, metadata.get(DIGEST), tokens)
            arrays = arrays_of(empty, len(tokens))
            _require_arrays(header, arrays)
            saved.read(arrays, lambda name, window, words: None)
            yield saved
    except OSError as error:
        raise StateError(f"{path} cannot be read: {error.strerror}; name a file that save_state wrote.") from None
    except ValueError as error:
        raise StateError(f"{path!r} names no file: {error}.") from None


def _head(file: BinaryIO, size: int, path: Path) -> bytes:
    if size > HEADER_BYTES:
        raise StateError(f"{path} has a header of {size:,} bytes, longer than any state's; it is no saved state.")
    return file.read(size)


def _fill(file: BinaryIO, into: np.ndarray, path: Path) -> None:
    if file.readinto(into.data.cast("B")) < into.nbytes:  # type: ignore[attr-defined]
        raise StateError(f"{path} has become shorter; it is cut short: save it again.")


def _metadata(header: Header) -> dict[str, str]:
    try:
        metadata = json.loads(header.raw[8:])["__metadata__"]
        named = {**metadata, FINGERPRINT: json.loads(metadata[FINGERPRINT])}
        if not isinstance(named[FINGERPRINT], dict) or not isinstance(named.get(DIGEST, ""), str):
            raise TypeError("its fingerprint or digest is of the wrong kind")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise StateError(f"{header.path} is not a saved state: {error}; save it again.") from None
    return named


def _require_fingerprint(metadata: Mapping[str, str], fingerprint: Mapping[str, str]) -> None:
    found: Mapping[str, str] = metadata[FINGERPRINT]  # type: ignore[assignment]
    for key, value in fingerprint.items():
        if found.get(key) != value:
            raise StateError(
                f"the saved state was made with {key} {found.get(key)!r}, this model has {value!r}; "
                "run the prompt again."
            )


def _tokens(file: BinaryIO, header: Header, empty: Sequence[LayerState], vocab: int) -> list[int]:
    place = header.tensors.get(TOKENS)
    if place is None or place.dtype != "I32" or len(place.shape) != 1 or not place.nbytes:
        raise StateError(f"{header.path} is not a saved state: it holds no list of tokens; save it again.")
    count = place.shape[0]
    room = min((layer.capacity for layer in empty if isinstance(layer, KVState)), default=count)
    if count > room:
        raise ContextError(
            f"the saved state holds {count:,} tokens and memory is reserved for {room:,}; "
            f"load with context={count + 1} or more."
        )
    ids = np.empty(count, "<i4")
    file.seek(place.offset)
    _fill(file, ids, header.path)
    if ids.min() < 0 or ids.max() >= vocab:
        worst = int(ids[(ids < 0) | (ids >= vocab)][0])
        raise StateError(
            f"{header.path} holds token {worst}, outside the vocabulary of {vocab:,}; it is damaged: save it again."
        )
    return ids.tolist()


def _require_arrays(header: Header, arrays: Mapping[str, tuple[mx.array, tuple[int, ...]]]) -> None:
    wanted = {name: (DTYPES[array.dtype], shape) for name, (array, shape) in arrays.items()}
    found = {name: (place.dtype, place.shape) for name, place in header.tensors.items() if name != TOKENS}
    for name in {**wanted, **found}:
        if wanted.get(name) != found.get(name):
            raise StateError(
                f"{header.path}: array {name[:200]!r} is {found.get(name, 'missing')} where this model with these "
                f"tokens has {wanted.get(name, 'none')}; it is damaged: save it again."
            )
    data = sum(place.nbytes for place in header.tensors.values())
    if len(header.raw) + data != header.file_bytes:
        raise StateError(f"{header.path} holds bytes that belong to no array; it is damaged: save it again.")
