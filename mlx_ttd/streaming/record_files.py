"""A store's files of expert records: opened when first read, each record checked when it has to be."""

from __future__ import annotations

import hashlib
import os

import numpy as np

from ..errors import RecordError
from ..store import Stamp, Store, stamp_of
from .read_pool import Read, open_for_reading


class RecordFiles:
    """`verify`: when a record's SHA-256 is compared, "off", "first-read" or "always"; `read_mode`: cached or direct.

    Where a file is no longer what it was when the store was opened, each of its records is compared once more before
    it counts as known, whatever `verify` says.
    """

    def __init__(self, store: Store, verify: str, read_mode: str):
        self._store, self._verify, self._read_mode = store, verify, read_mode
        self._known = np.full((len(store.layouts), store.spec.experts), verify == "off")
        self._open: dict[int, tuple[int, int]] = {}
        self._stamps: dict[int, Stamp | None] = {}

    def read(self, layer: int, expert: int, into: memoryview) -> Read:
        """The read that fills `into` with a record. RecordError where its file cannot be opened."""
        fd, start = self._place(layer)
        offset = start + expert * len(into)

        def fail(reason: str) -> Exception:
            return RecordError(
                f"{self._store.expert_file(layer)[0]}: the record of layer {layer}, expert {expert} at byte {offset:,} "
                f"cannot be used: {reason}; run `mlx-ttd verify` on the store and copy or convert it again."
            )

        def check(data: memoryview) -> str | None:
            if hashlib.sha256(data).hexdigest() != self._store.record_digest(layer, expert):
                return "its SHA-256 is not the manifest's"
            self._known[layer, expert] = True
            return None

        self._look(layer, fd)
        known = self._verify != "always" and self._known[layer, expert]
        return Read(fd, offset, into, None if known else check, fail)

    def _look(self, layer: int, fd: int) -> None:
        """Know no record of a file that was written to or replaced since this was last asked. It takes about 2 us."""
        stamp = stamp_of(os.fstat(fd))
        if stamp != self._stamps[layer]:
            self._known[layer] = False
            self._stamps[layer] = stamp

    def _place(self, layer: int) -> tuple[int, int]:
        if layer not in self._open:
            path, start, _ = self._store.expert_file(layer)
            self._stamps[layer] = self._store.stamps.get(path)
            try:
                self._open[layer] = (open_for_reading(path, self._read_mode == "direct"), start)
            except OSError as error:
                raise RecordError(f"{path} cannot be opened ({error.strerror}); was the store moved?") from None
        return self._open[layer]

    def close(self) -> None:
        for fd, _ in self._open.values():
            os.close(fd)
        self._open.clear()
