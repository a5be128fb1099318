"""SHA-256 of byte ranges and of whole files, computed so that no byte is hashed twice."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from ..errors import StoreError, TTDError
from .file_ranges import ranges


def sha256(data: bytes | memoryview) -> str:
    """Lower-case hex SHA-256 of `data`."""
    return hashlib.sha256(data).hexdigest()


def range_digest(
    path: Path,
    offset: int,
    nbytes: int,
    what: str,
    error: type[TTDError] = StoreError,
    buffer: memoryview | None = None,
) -> str:
    """Hex SHA-256 of `nbytes` at `offset`, read in small ranges past the page cache; a short read raises `error`."""
    digest = hashlib.sha256()
    for block in ranges(path, offset, nbytes, what, error, buffer):
        digest.update(block)
    return digest.hexdigest()


def file_digest(header: bytes, parts: Iterable[str]) -> str:
    """The digest of a file: SHA-256 of its header's bytes and its tensors' or records' digests (hex), in order."""
    digest = hashlib.sha256(header)
    for part in parts:
        digest.update(bytes.fromhex(part))
    return digest.hexdigest()
