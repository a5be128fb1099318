"""One commit of a repository on the hub: its files fetched into a folder, each checked, and headers read from afar."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ..errors import CheckpointError
from .digest import range_digest
from .file_ranges import ranges
from .hub_listing import SIZE_LIMIT, Listed
from .hub_transfer import Remote
from .safetensors_file import Header, parse_header

HEADER_GUESS = 1 << 20
PART = ".part"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Repo:
    """`files` is what the hub lists; `report` is told of bytes as they arrive in `folder`."""

    remote: Remote
    files: dict[str, Listed]
    folder: Path
    report: Callable[[int], None]

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return {}

    def size(self, name: str) -> int:
        """Bytes of a file, asked for where the list does not state them."""
        if name not in self._sizes:
            listed = self.files[name].size
            found = self.remote.size_of(name) if listed is None else listed
            if found is None or found > SIZE_LIMIT:
                raise CheckpointError(
                    f"The hub does not tell how large {name} of {self.remote.repo} is; try again later, or download "
                    "the repository and give its directory."
                )
            self._sizes[name] = found
        return self._sizes[name]

    def fetch(self, name: str) -> Path:
        """Download a file, or take the one there, and check its digest; one that differs is fetched once more."""
        path = self.folder / name
        part = path.with_name(path.name + PART)
        if not self.files[name].digest:
            raise CheckpointError(
                f"The hub gives no digest of {name} of {self.remote.repo} to check it by; try again later, or download "
                "the repository and give its directory."
            )
        if path.is_file():
            if self._intact(path, name):
                return path
            path.unlink()
        for _ in range(2):
            self._download(name, part)
            if self._intact(part, name):
                os.replace(part, path)
                return path
            part.unlink()
        raise CheckpointError(
            f"{name} of {self.remote.repo} arrived twice with another digest than the hub's; try again later."
        )

    def _download(self, name: str, part: Path) -> None:
        """Bring what is missing of a file; a stopped download goes on where it ended."""
        log.info("downloading %s of %s", name, self.remote.repo)
        size = self.size(name)
        part.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "ab") as file:
            if file.tell() > size:
                file.truncate(0)
            self.report(file.tell())
            for block in self.remote.blocks(name, file.tell(), None, size):
                file.write(block)
                self.report(len(block))

    def _intact(self, path: Path, name: str) -> bool:
        size, wanted = path.stat().st_size, self.files[name].digest
        if size != self.size(name):
            return False
        if len(wanted) == 64:
            return range_digest(path, 0, size, name, CheckpointError) == wanted
        digest = hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
        for block in ranges(path, 0, size, name, CheckpointError):
            digest.update(block)
        return digest.hexdigest() == wanted

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of a file, without downloading it."""
        return b"".join(self.remote.blocks(name, start, stop, self.size(name)))

    def header(self, name: str) -> Header:
        """The checked header of a shard, read without the shard."""
        size, position = self.size(name), 0
        known = self.read(name, 0, min(size, HEADER_GUESS))

        def following(count: int) -> bytes:
            nonlocal known, position
            if position + count > len(known):
                known += self.read(name, len(known), min(size, position + count))
            position += count
            return known[position - count : position]

        return parse_header(self.folder / name, size, following, CheckpointError)
