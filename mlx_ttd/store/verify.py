"""Checking a store's structure, and every byte of it against its digests, in parallel and in bounded memory."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ..errors import OptionError, RecordError, StoreError
from .digest import range_digest
from .file_ranges import block_buffer
from .format import RECORDS_START
from .progress import Meter, Progress
from .reader import Store, open_store
from .safetensors_file import read_header

LISTED = 20


@dataclass(frozen=True)
class VerifyReport:
    """What was read and found equal to its digest; `policy` is what the manifest says the store was made by."""

    digest: str
    policy: str
    files: int
    tensors: int
    records: int
    bytes: int
    seconds: float


_own = threading.local()


def _prepare() -> None:
    _own.buffer = block_buffer()


@dataclass(frozen=True)
class _Part:
    path: Path
    what: str
    offset: int
    nbytes: int
    digest: str
    record: bool

    def damage(self) -> str | None:
        """What is wrong with this part, or None. Runs on a thread that `_prepare` has prepared."""
        try:
            found = range_digest(self.path, self.offset, self.nbytes, self.what, buffer=_own.buffer)
        except StoreError as error:
            return str(error)
        if found == self.digest:
            return None
        return f"{self.path}: {self.what}, {self.nbytes:,} bytes at {self.offset:,}, does not match its digest."


def _parts(store: Store) -> Iterator[_Part]:
    for name, entry in store.manifest.files.items():
        path = store.path / name
        if entry.records is not None:
            stride = (entry.bytes - RECORDS_START) // len(entry.records)
            layer = "MTP layer" if "mtp" in name else f"layer {int(path.stem.removeprefix('layer-'))}"
            for expert, digest in enumerate(entry.records):
                start = RECORDS_START + expert * stride
                yield _Part(path, f"{layer}, expert {expert}", start, stride, digest, True)
        for tensor, digest in (entry.tensors or {}).items():
            info = read_header(path).tensors[tensor]
            yield _Part(path, f"tensor {tensor!r}", info.offset, info.nbytes, digest, False)
    for name, copied in store.manifest.copied.items():
        yield _Part(store.path / name, "the file", 0, copied.bytes, copied.sha256, False)


def verify(
    path: str | os.PathLike[str], threads: int | None = None, progress: Callable[[Progress], None] | None = None
) -> VerifyReport:
    """Open a store, read every tensor, record and copied file of it, and compare digests.

    `threads` is four times the CPUs by default, at most 16: some read while others hash.
    Raises RecordError when an expert record is damaged, StoreError for anything else; the message lists what is.
    """
    if threads is not None and not 1 <= threads <= 256:
        raise OptionError(f"threads is {threads}; give a number from 1 to 256.")
    started = time.monotonic()
    store = open_store(path)
    parts = sorted(_parts(store), key=lambda part: -part.nbytes)
    meter = Meter(progress)
    meter.begin(sum(part.nbytes for part in parts))
    damaged = []
    with ThreadPoolExecutor(threads or min(16, 4 * (os.cpu_count() or 1)), "verify", _prepare) as pool:
        for part, damage in zip(parts, pool.map(_Part.damage, parts), strict=True):
            meter.current = part.path.name
            meter.advance(part.nbytes)
            if damage:
                damaged.append((part.record, damage))
    meter.finish()
    if damaged:
        more = f" And {len(damaged) - LISTED} more." if len(damaged) > LISTED else ""
        kind = RecordError if any(record for record, _ in damaged) else StoreError
        raise kind(" ".join(message for _, message in damaged[:LISTED]) + more + " Copy or convert the store again.")
    files = {part.path for part in parts}
    records = sum(part.record for part in parts)
    tensors = len(parts) - records - len(store.manifest.copied)
    seconds = time.monotonic() - started
    return VerifyReport(store.digest, store.manifest.policy, len(files), tensors, records, meter.total, seconds)
