"""Embedding rows read from disk when a token needs them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

import mlx.core as mx
import numpy as np

from ..errors import BusyError, OptionError, StoreError
from ..kernels import Weight, to_device
from ..observe import Counters
from ..spec import Quantisation, open_regular
from ..store import MX_DTYPES, TensorInfo, stamp_of
from .read_pool import pread_into


def require_in_vocabulary(ids: Iterable[int], vocab: int) -> None:
    """OptionError for the first token id that a table of `vocab` rows lacks."""
    for token in ids:
        if not 0 <= token < vocab:
            raise OptionError(f"token {token} is outside the vocabulary of {vocab:,}.")


class EmbeddingRows:
    """Rows of a table [vocab, hidden] in a file; quantised tables are dequantised row by row."""

    def __init__(self, tensors: Mapping[str, TensorInfo], quantisation: Quantisation | None, counters: Counters):
        self._parts = list(tensors.values())
        self._quantisation, self._counters = quantisation, counters
        path = self._parts[0].path
        try:
            self._fd: int | None = open_regular(path)
        except OSError as error:
            raise StoreError(f"{path} cannot be opened: {error.strerror}; was the store moved?") from None
        self._stamp = stamp_of(os.fstat(self._fd))

    def __call__(self, ids: np.ndarray, dtype: mx.Dtype) -> mx.array:
        """Rows [n, hidden] in `dtype` of int ids [n]. OptionError for an id that the table lacks, StoreError where the
        file cannot be read, is cut short or was changed."""
        fd = self._unchanged()
        distinct, inverse = np.unique(ids, return_inverse=True)
        require_in_vocabulary(distinct.tolist(), self._parts[0].shape[0])
        parts = [self._read(fd, part, distinct) for part in self._parts]
        q = self._quantisation
        if q is None:
            rows = Weight(parts[0])
        else:
            rows = Weight(parts[0], parts[1], parts[2] if len(parts) > 2 else None, q.bits, q.group, q.mode)
        return rows.numbers(dtype)[to_device(inverse.reshape(-1))]

    def _unchanged(self) -> int:
        """The file, which still is what it was: a single row has no digest to compare."""
        if self._fd is None:
            raise BusyError(
                "this model is closed, by close() or since its LLM was let go; load it again and keep that."
            )
        if stamp_of(os.fstat(self._fd)) != self._stamp:
            raise StoreError(f"{self._parts[0].path} was changed after the model was loaded; load the model again.")
        return self._fd

    def _read(self, fd: int, part: TensorInfo, ids: np.ndarray) -> mx.array:
        size = part.nbytes // part.shape[0]
        raw = np.empty((len(ids), size), np.uint8)
        for row, token in enumerate(ids):
            try:
                got = pread_into(fd, part.offset + int(token) * size, memoryview(raw[row]))
                reason = "is cut short" if got != size else None
            except OSError as error:
                reason = f"cannot be read: {error.strerror}"
            if reason is not None:
                raise StoreError(
                    f"{part.path}: row {int(token)} of {part.name} {reason}; copy or convert the store again."
                )
        self._counters.embedding_bytes += raw.nbytes
        return to_device(raw).view(MX_DTYPES[part.dtype]).reshape(len(ids), *part.shape[1:])

    def close(self) -> None:
        """Give the file back. A call is then a BusyError."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
