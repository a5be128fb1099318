"""One safetensors file written in ranges: bytes at offsets, a digest per tensor or record, durable when finished."""

from __future__ import annotations

import errno
import hashlib
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .digest import file_digest, sha256
from .file_ranges import drop_cached, pass_by_cache
from .format import RECORDS
from .manifest import FileEntry
from .safetensors_file import Header

SYNC_BYTES = 64 << 20


class FileWriter:
    """Writes the parts of one new file, each part in ascending order; `finish` makes it durable and gives its entry.

    A part is a tensor's name, or an expert's number in a file of records.
    """

    def __init__(self, header: Header):
        self.header = header
        self.digests: dict[str | int, Any] = {}
        self.unsynced = 0
        self.syncer = ThreadPoolExecutor(1, "sync")
        self.syncing: Future[None] | None = None
        header.path.parent.mkdir(parents=True, exist_ok=True)
        self.fd = os.open(header.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        pass_by_cache(self.fd)
        self._write_at(0, memoryview(header.raw))

    def digest(self, part: str | int, data: memoryview) -> None:
        """Take the part's next bytes into its digest."""
        if part not in self.digests:
            self.digests[part] = hashlib.sha256()
        self.digests[part].update(data)

    def put(self, part: str | int, position: int, data: memoryview) -> None:
        """Write `data` at `position` bytes into the part's tensor (into the whole of `records` for an expert)."""
        tensor = self.header.tensors[RECORDS if isinstance(part, int) else part]
        self._write_at(tensor.offset + position, data)

    def write(self, part: str | int, position: int, data: memoryview) -> None:
        """Both, for who has nothing else to do meanwhile."""
        self.digest(part, data)
        self.put(part, position, data)

    def _write_at(self, offset: int, data: memoryview) -> None:
        done = 0
        while done < len(data):
            count = os.pwrite(self.fd, data[done:], offset + done)
            if count == 0:
                raise OSError(errno.EIO, f"{self.header.path} takes no more bytes")
            done += count
        self.unsynced += len(data)
        if self.unsynced >= SYNC_BYTES:
            self._sync()

    def flush(self) -> None:
        """Return when all that was written is durable."""
        self._sync()
        self._wait()

    def _sync(self) -> None:
        """Begin to make durable what was written so far, once that of the time before is."""
        self._wait()
        self.syncing = self.syncer.submit(self._flush)
        self.unsynced = 0

    def _wait(self) -> None:
        if self.syncing is not None:
            self.syncing.result()

    def _flush(self) -> None:
        os.fsync(self.fd)
        drop_cached(self.fd, 0, self.header.file_bytes)

    def finish(self) -> FileEntry:
        """Flush the file to the disk and describe it."""
        self.flush()
        digests = {part: digest.hexdigest() for part, digest in self.digests.items()}
        records = [digests[i] for i in range(len(digests))] if RECORDS in self.header.tensors else None
        tensors = {name: digests[name] for name in self.header.tensors} if records is None else None
        parts = records if tensors is None else list(tensors.values())
        raw = self.header.raw
        return FileEntry(self.header.file_bytes, sha256(raw), file_digest(raw, parts or []), tensors, records)

    def close(self) -> None:
        """Close the file; safe to call twice."""
        self.syncer.shutdown()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
