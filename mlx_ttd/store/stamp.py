"""Whether a file is still the one that was looked at, without reading it."""

from __future__ import annotations

import os
from typing import NamedTuple


class Stamp(NamedTuple):
    """Bytes, time of the last change in ns, and the file's number on its file system."""

    nbytes: int
    changed_ns: int
    inode: int


def stamp_of(found: os.stat_result) -> Stamp:
    """The stamp of a file by what stat says of it."""
    return Stamp(found.st_size, found.st_mtime_ns, found.st_ino)
