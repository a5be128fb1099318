"""A source checkpoint: config.json and every tensor of a directory's safetensors files, read in bounded ranges."""

from __future__ import annotations

import hashlib
import os
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import CheckpointError
from ..spec import ModelSpec, model_spec, read_json
from .file_ranges import drop_cached, opened, pass_by_cache, read_into
from .format import CONFIG
from .safetensors_file import TensorInfo, read_header

INDEX = "model.safetensors.index.json"
INDEX_BYTES = 64 << 20


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint directory. `fingerprint` covers the config and the header of every file; `state` their times too."""

    path: Path
    config: dict[str, Any]
    spec: ModelSpec
    tensors: dict[str, TensorInfo]
    fingerprint: str
    state: str
    _open: ExitStack = field(default_factory=ExitStack, repr=False)
    _descriptors: dict[Path, int] = field(default_factory=dict, repr=False)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._descriptors.clear()
        self._open.close()

    def read(self, info: TensorInfo, start: int, buffer: memoryview) -> None:
        """Fill `buffer` from byte `start` of a tensor. Raises CheckpointError on a short read."""
        fd = self._descriptors.get(info.path)
        if fd is None:
            fd = self._descriptors[info.path] = self._open.enter_context(opened(info.path, CheckpointError))
            pass_by_cache(fd)
        read_into(fd, buffer, info.offset + start, info.path, f"tensor {info.name!r}", CheckpointError)
        drop_cached(fd, info.offset + start, len(buffer))


def _files(root: Path) -> list[Path]:
    index = root / INDEX
    if not index.is_file():
        files = sorted(p for p in root.glob("*.safetensors") if not p.name.startswith("."))
        if not files:
            raise CheckpointError(f"{root} holds no *.safetensors file; give the directory of a checkpoint.")
        return files
    names = read_json(index, INDEX_BYTES).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(n, str) for n in names.values()):
        raise CheckpointError(f"{index} has no weight_map of tensor names to files; download it again.")
    files = []
    for name in sorted(set(names.values())):
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts or "\\" in name:
            raise CheckpointError(f"{index} names {name!r}, which leads outside the checkpoint.")
        files.append(root / name)
    missing = [p.name for p in files if not p.is_file()]
    if missing:
        raise CheckpointError(
            f"{root} lacks {len(missing)} of {len(files)} shards ({', '.join(missing[:5])}); download them."
        )
    return files


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read the config and all headers of a checkpoint directory. Raises CheckpointError, ConfigError."""
    root = Path(path)
    if not root.is_dir():
        raise CheckpointError(
            f"{root} is not a directory; give the directory that holds config.json and *.safetensors."
        )
    config = read_json(root / CONFIG)
    spec = model_spec(config, str(root / CONFIG))
    fingerprint, times = hashlib.sha256((root / CONFIG).read_bytes()), []
    tensors: dict[str, TensorInfo] = {}
    for file in _files(root):
        header = read_header(file, CheckpointError)
        fingerprint.update(f"\0{file.name}\0{header.file_bytes}\0".encode() + header.raw)
        times.append(file.stat().st_mtime_ns)
        for name, info in header.tensors.items():
            if name in tensors:
                raise CheckpointError(
                    f"Tensor {name!r} stands in both {tensors[name].path.name} and {file.name} of {root}."
                )
            tensors[name] = info
    return Checkpoint(root, config, spec, tensors, fingerprint.hexdigest(), f"{fingerprint.hexdigest()} {times}")
