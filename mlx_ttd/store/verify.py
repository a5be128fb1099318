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
from .digest import range_digest, sha256
from .file_ranges import block_buffer, ranges
from .format import RECORDS_START
from .progress import Meter, Progress
from .reader import Store, open_store
from .safetensors_file import read_header

LISTED = 20
# Bytes read by all threads together, and by one at a time: larger reads are no faster.
ROOM, MOST_ROOM = 64 << 20, 8 << 20


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


@dataclass(frozen=True)
class _Part:
    path: Path
    what: str
    offset: int
    nbytes: int
    digest: str
    record: bool

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


_own = threading.local()


def _prepare(room: int) -> None:
    _own.buffer = block_buffer(room)


def _digests(run: list[_Part]) -> list[str]:
    first = run[0]
    if len(run) == 1:
        return [range_digest(first.path, first.offset, first.nbytes, first.what, buffer=_own.buffer)]
    (block,) = ranges(first.path, first.offset, run[-1].end - first.offset, first.what, buffer=_own.buffer)
    return [sha256(block[part.offset - first.offset : part.end - first.offset]) for part in run]


def _damage(run: list[_Part]) -> list[tuple[_Part, str]]:
    """What is wrong with each damaged part of a run. For a thread that `_prepare` has prepared."""
    try:
        found = _digests(run)
    except StoreError as error:
        return [(run[0], str(error))] if len(run) == 1 else [damage for part in run for damage in _damage([part])]
    return [
        (part, f"{part.path}: {part.what}, {part.nbytes:,} bytes at {part.offset:,}, does not match its digest.")
        for part, digest in zip(run, found, strict=True)
        if digest != part.digest
    ]


def _parts(store: Store) -> Iterator[_Part]:
    for name, entry in store.manifest.files.items():
        path = store.path / name
        if entry.records is not None:
            stride = (entry.bytes - RECORDS_START) // len(entry.records)
            layer = "MTP layer" if "mtp" in name else f"layer {int(path.stem.removeprefix('layer-'))}"
            for expert, digest in enumerate(entry.records):
                start = RECORDS_START + expert * stride
                yield _Part(path, f"{layer}, expert {expert}", start, stride, digest, True)
        places = read_header(path).tensors
        for tensor, digest in (entry.tensors or {}).items():
            info = places[tensor]
            yield _Part(path, f"tensor {tensor!r}", info.offset, info.nbytes, digest, False)
    for name, copied in store.manifest.copied.items():
        path = store.path / name
        # Bytes after those that were copied are the file's too.
        nbytes = max(copied.bytes, path.stat().st_size if path.is_file() else 0)
        yield _Part(path, "the file", 0, nbytes, copied.sha256, False)


def _runs(parts: Iterator[_Part], room: int) -> Iterator[list[_Part]]:
    """Parts that follow one another in a file, as many together as `room` bytes take; a larger one by itself."""
    run: list[_Part] = []
    for part in parts:
        follows = run and part.path == run[-1].path and part.offset == run[-1].end
        if run and not (follows and part.end - run[0].offset <= room):
            yield run
            run = []
        run.append(part)
    yield run


def verify(
    path: str | os.PathLike[str],
    threads: int | None = None,
    progress: Callable[[Progress], None] | None = None,
    follow_links: bool = False,
) -> VerifyReport:
    """Open a store, read every tensor, record and copied file of it, and compare digests.

    `threads` is four times the CPUs by default, at most 16: some read while others hash. follow_links: whether links
    may lead outside the store.
    Raises RecordError when an expert record is damaged, StoreError for anything else; the message lists what is.
    """
    if threads is not None and not 1 <= threads <= 256:
        raise OptionError(f"threads is {threads}; give a number from 1 to 256.")
    started = time.monotonic()
    store = open_store(path, follow_links)
    threads = threads or min(16, 4 * (os.cpu_count() or 1))
    room = min(MOST_ROOM, ROOM // threads)
    parts = list(_parts(store))
    runs = sorted(_runs(iter(parts), room), key=lambda run: run[0].offset - run[-1].end)
    meter = Meter(progress)
    meter.begin(sum(part.nbytes for part in parts))
    damaged: list[tuple[_Part, str]] = []
    with ThreadPoolExecutor(threads, "verify", _prepare, (room,)) as pool:
        for run, damages in zip(runs, pool.map(_damage, runs), strict=True):
            meter.current = run[0].path.name
            meter.advance(run[-1].end - run[0].offset)
            damaged += damages
    meter.finish()
    if damaged:
        more = f" And {len(damaged) - LISTED} more." if len(damaged) > LISTED else ""
        kind = RecordError if any(part.record for part, _ in damaged) else StoreError
        raise kind(" ".join(message for _, message in damaged[:LISTED]) + more + " Copy or convert the store again.")
    files = {part.path for part in parts}
    records = sum(part.record for part in parts)
    tensors = len(parts) - records - len(store.manifest.copied)
    seconds = time.monotonic() - started
    return VerifyReport(store.digest, store.manifest.policy, len(files), tensors, records, meter.total, seconds)
