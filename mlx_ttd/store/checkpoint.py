"""A source checkpoint: config.json and every tensor of a directory's safetensors files, read in bounded ranges."""

from __future__ import annotations

import hashlib
import os
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from ..errors import CheckpointError
from ..spec import ModelSpec, model_spec, read_json, user_path
from .checkpoint_files import plain_file, verbatim_names
from .file_ranges import PAGE, direct, drop_cached, opened, pass_by_cache, read_around, read_into
from .foreign import refuse_file, refuse_foreign
from .format import CONFIG
from .rooms import Rooms
from .safetensors_file import Header, TensorInfo, read_header

INDEX = "model.safetensors.index.json"
# A checkpoint of 397 billion parameters in block FP8 with every expert apart names 0.2 million tensors, 25 MB.
INDEX_BYTES, NAME_CHARACTERS = 64 << 20, 200
LARGE_READ = 1 << 20


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's config and tensors. `fingerprint` covers config and headers, `state` the contents too.

    `formats` are those that its files' headers say they are of, such as 'pt' or 'mlx'.
    """

    path: Path
    config: dict[str, Any]
    spec: ModelSpec
    tensors: dict[str, TensorInfo]
    fingerprint: str
    state: str = ""
    origin: dict[str, str | None] = field(default_factory=dict)
    formats: frozenset[str] = frozenset()
    rooms: Rooms = field(default_factory=Rooms, repr=False)
    _open: dict[Path, tuple[tuple[int, int], ExitStack]] = field(default_factory=dict, repr=False)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        for path in list(self._open):
            self.close(path)

    def close(self, path: Path) -> None:
        """Close one of the files; reading from it opens it again."""
        if path in self._open:
            self._open.pop(path)[1].close()

    def read(self, info: TensorInfo, start: int, nbytes: int) -> np.ndarray:
        """uint8 [nbytes] from byte `start` of a tensor. Raises CheckpointError on a short read."""
        fds, offset, what = self._descriptors(info.path), info.offset + start, f"tensor {info.name!r}"
        if nbytes >= LARGE_READ:
            room = self.rooms.take(nbytes + PAGE)
            lead = read_around(fds, room.data, offset, nbytes, info.path, what, CheckpointError)
            return room[lead : lead + nbytes]
        found = np.empty(nbytes, np.uint8)
        read_into(fds[-1], found.data, offset, info.path, what, CheckpointError)
        drop_cached(fds[-1], offset, nbytes)
        return found

    def peek(self, info: TensorInfo, nbytes: int) -> np.ndarray:
        """uint8 [nbytes], own memory, from the start of a tensor, without fetching more than that."""
        return self.read(info, 0, nbytes).copy()

    def _descriptors(self, path: Path) -> tuple[int, int]:
        if path not in self._open:
            stack = ExitStack()
            plain = stack.enter_context(opened(path, CheckpointError))
            pass_by_cache(plain)
            self._open[path] = (stack.enter_context(direct(path, plain)), plain), stack
        return self._open[path][0]

    def stop(self) -> None:
        """Let a read that waits for bytes from elsewhere end now; nothing will be read any more."""

    def release(self, needed: set[str]) -> None:
        """Tell that only the tensors named in `needed` will be read from now on."""

    def download_bytes(self, names: set[str]) -> int:
        """Bytes to be fetched from elsewhere before these tensors are read."""
        return 0

    def transient_bytes(self, steps: list[set[str]]) -> int:
        """Bytes of disk that reading these sets of tensors, one after the other, takes for a while at most."""
        return 0


def indexed(root: Path) -> list[str]:
    """The names of the shards in the index of a checkpoint; the files themselves need not be there."""
    names = read_json(root / INDEX, INDEX_BYTES).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(n, str) for n in names.values()):
        raise CheckpointError(f"{root / INDEX} has no weight_map of tensor names to files; download it again.")
    for name in names.values():
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts or "\\" in name:
            raise CheckpointError(f"{root / INDEX} names {name!r}, which leads outside the checkpoint.")
        if not name.isprintable() or len(name) > NAME_CHARACTERS:
            raise CheckpointError(f"{root / INDEX} names {name[:100]!r}, which is no file's name; download it again.")
    return sorted(set(names.values()))


def _shards(root: Path) -> list[Path]:
    if plain_file(root, INDEX) is None:
        names = sorted(p.name for p in root.glob("*.safetensors") if not p.name.startswith("."))
        if not names:
            raise CheckpointError(f"{root} holds no *.safetensors file; give the directory of a checkpoint.")
    else:
        names = indexed(root)
    files = [root / name for name in names]
    missing = [name for name in names if plain_file(root, name) is None]
    if missing:
        raise CheckpointError(
            f"{root} lacks {len(missing)} of {len(files)} shards ({', '.join(missing[:5])}); download them."
        )
    return files


def all_tensors(headers: list[Header]) -> dict[str, TensorInfo]:
    """The tensors of every shard. Raises CheckpointError when two shards hold the same."""
    tensors: dict[str, TensorInfo] = {}
    for header in headers:
        for name, info in header.tensors.items():
            if name in tensors:
                raise CheckpointError(f"Tensor {name!r} stands in both {tensors[name].path} and {header.path.name}.")
            tensors[name] = info
    return tensors


def formats_of(headers: list[Header]) -> frozenset[str]:
    """The formats that the headers state."""
    return frozenset(header.format for header in headers if header.format is not None)


def fingerprint_of(config: Path, headers: list[Header]) -> str:
    """SHA-256 of the config and of each shard's name, size and header."""
    digest = hashlib.sha256(config.read_bytes())
    for header in headers:
        digest.update(f"\0{header.path.name}\0{header.file_bytes}\0".encode() + header.raw)
    return digest.hexdigest()


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read the config and all headers of a checkpoint directory. Raises CheckpointError, ConfigError."""
    root = user_path(path)
    refuse_file(root)
    if not root.is_dir():
        raise CheckpointError(
            f"{root} is not a directory; give one that holds config.json and *.safetensors, or a hub id."
        )
    for name in verbatim_names(root):
        plain_file(root, name)
    plain_file(root, INDEX)
    config = read_json(root / CONFIG)
    spec = model_spec(config, str(root / CONFIG))
    headers = [read_header(file, CheckpointError) for file in _shards(root)]
    if (found := sum(len(header.tensors) for header in headers)) < len(spec.layer_types):
        raise CheckpointError(
            f"{root} holds {found:,} tensors, too few for the {len(spec.layer_types):,} layers of its config.json; "
            "download the files that belong together."
        )
    tensors = all_tensors(headers)
    refuse_foreign(str(root), config, tensors)
    fingerprint = fingerprint_of(root / CONFIG, headers)
    state = f"{fingerprint} {[header.path.stat().st_mtime_ns for header in headers]}"
    origin: dict[str, str | None] = {"repo": None, "revision": None}
    return Checkpoint(root, config, spec, tensors, fingerprint, state, origin, formats_of(headers))
