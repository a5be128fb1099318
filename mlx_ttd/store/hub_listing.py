"""The files of one commit as a hub lists them: untrusted JSON, of which only what is plausible is kept."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError
from .hub_transfer import Remote

LISTING_BYTES, SIZE_LIMIT = 8 << 20, 1 << 42


@dataclass(frozen=True)
class Listed:
    """A file's bytes (None: not stated) and digest: SHA-256 (64 digits), git object id (40), or "" for none."""

    size: int | None
    digest: str


def _size(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value <= SIZE_LIMIT else None


def _listed(entry: dict[str, Any]) -> Listed:
    lfs = entry.get("lfs") if isinstance(entry.get("lfs"), dict) else None
    sizes = {_size(entry.get("size")), _size(lfs.get("size")) if lfs else None} - {None}
    digest = lfs.get("sha256") if lfs else entry.get("blobId")
    known = isinstance(digest, str) and re.fullmatch("[0-9a-f]{64}" if lfs else "[0-9a-f]{40}", digest)
    return Listed(sizes.pop() if len(sizes) == 1 else None, str(digest) if known else "")


def list_files(remote: Remote) -> tuple[str, dict[str, Listed]]:
    """The commit of the revision (40 hex digits) and its files by name. Raises CheckpointError."""
    try:
        data = json.loads(remote.description(LISTING_BYTES).decode())
    except (ValueError, RecursionError):
        raise CheckpointError(f"The hub describes {remote.repo} in what is no JSON; try again later.") from None
    commit = data.get("sha") if isinstance(data, dict) else None
    entries = data.get("siblings") if isinstance(data, dict) else None
    if not isinstance(commit, str) or not re.fullmatch("[0-9a-f]{40}", commit):
        raise CheckpointError(f"The hub names no commit for {remote.repo}; try again later.")
    if not isinstance(entries, list) or not all(
        isinstance(e, dict) and isinstance(e.get("rfilename"), str) for e in entries
    ):
        raise CheckpointError(f"The hub lists no files of {remote.repo}; try again later.")
    files = {entry["rfilename"]: _listed(entry) for entry in entries}
    if len(files) < len(entries):
        raise CheckpointError(f"The hub lists a file of {remote.repo} twice; try again later.")
    return commit, files
