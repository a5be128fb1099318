"""A checkpoint on the Hugging Face hub, read as if it lay in a directory; its shards come and go, each checked."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CheckpointError, TTDError
from ..spec import model_spec, read_json
from .checkpoint import INDEX, Checkpoint, all_tensors, fingerprint_of, formats_of, indexed
from .digest import range_digest
from .file_ranges import ranges
from .foreign import refuse_foreign, refuse_names
from .format import CONFIG, VERBATIM_LIMIT, verbatim
from .safetensors_file import Header, TensorInfo, make_header, parse_header, read_header

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
HEADER_GUESS = 1 << 20
SINGLE = "model.safetensors"
KEPT = ".kept"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Repo:
    """One commit of a model repository; `files` maps a name to (bytes, SHA-256 or git object id)."""

    name: str
    commit: str
    files: dict[str, tuple[int, str]]
    folder: Path
    report: Callable[[int], None]

    def fetch(self, name: str) -> Path:
        """Download a file, or take the one there, and check its digest; one that differs is fetched once more."""
        from huggingface_hub import hf_hub_download

        path = self.folder / name
        for _ in range(2):
            if not path.is_file():
                log.info("downloading %s of %s", name, self.name)
                keywords = {"revision": self.commit, "local_dir": self.folder, "tqdm_class": _bar(self.report)}
                _ask(self.name, hf_hub_download, self.name, name, **keywords)
            if self._digest(path, name) == self.files[name][1]:
                return path
            path.unlink()
        raise CheckpointError(
            f"{name} of {self.name} arrived twice with another digest than the hub's; try again later."
        )

    def _digest(self, path: Path, name: str) -> str:
        size, wanted = self.files[name]
        if path.stat().st_size != size:
            return ""
        if len(wanted) == 64:
            return range_digest(path, 0, size, name, CheckpointError)
        return hashlib.sha1(f"blob {size}\0".encode() + path.read_bytes()).hexdigest()

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of a file, without downloading it."""
        from huggingface_hub import get_session, hf_hub_url
        from huggingface_hub.utils import build_hf_headers

        url = hf_hub_url(self.name, name, revision=self.commit)
        headers = {**build_hf_headers(), "Range": f"bytes={start}-{stop - 1}"}

        def receive() -> bytes:
            with get_session().stream("GET", url, headers=headers, follow_redirects=True) as answer:
                if answer.status_code != 206:
                    raise CheckpointError(f"The hub answers {answer.status_code} for a range of {name} of {self.name}.")
                return b"".join(answer.iter_bytes())[: stop - start]

        return bytes(_ask(self.name, receive))

    def header(self, name: str) -> Header:
        """The checked header of a shard, read without the shard."""
        size, position = self.files[name][0], 0
        known = self.read(name, 0, min(size, HEADER_GUESS))

        def following(count: int) -> bytes:
            nonlocal known, position
            if position + count > len(known):
                known += self.read(name, len(known), position + count)
            position += count
            return known[position - count : position]

        return parse_header(self.folder / name, size, following, CheckpointError)


def is_hub_id(source: str | os.PathLike[str]) -> bool:
    """Whether `source` means OWNER/NAME on the hub: it has that form, nothing lies there, and it names no *.ttd."""
    return bool(HUB_ID.fullmatch(str(source))) and Path(source).suffix != ".ttd" and not os.path.exists(source)


def _bar(report: Callable[[int], None]) -> type:
    from huggingface_hub.utils import tqdm

    class Reporting(tqdm):
        """The hub client's bar, shown by `report` alone."""

        def __init__(self, *arguments: Any, **keywords: Any):
            super().__init__(*arguments, **keywords | {"disable": True})

        def update(self, n: float | None = 1) -> None:
            report(int(n or 0))

    return Reporting


def _ask(repo: str, call: Any, *arguments: Any, **keywords: Any) -> Any:
    try:
        return call(*arguments, **keywords)
    except TTDError:
        raise
    except Exception as failure:  # the hub's client raises its own, the HTTP library's and the system's errors
        reason = str(failure).strip().splitlines() or [""]
        raise CheckpointError(f"{repo} could not be read from the hub: {type(failure).__name__}: {reason[0]}") from None


@dataclass(frozen=True)
class HubCheckpoint(Checkpoint):
    """Shards are fetched when first read; once less than half of one is needed, only that part stays."""

    repo: Repo | None = None
    kept: dict[str, TensorInfo] = field(default_factory=dict)
    checked: set[Path] = field(default_factory=set)

    def _name(self, shard: Path) -> str:
        return shard.relative_to(self.path).as_posix()

    def read(self, info: TensorInfo, start: int, nbytes: int) -> np.ndarray:
        """uint8 [nbytes] from byte `start` of a tensor, after fetching its shard when that is not there."""
        assert self.repo is not None
        info = self.kept.get(info.name, info)
        if info.name not in self.kept and info.path not in self.checked:
            self.repo.fetch(self._name(info.path))
            self.checked.add(info.path)
        return super().read(info, start, nbytes)

    def release(self, needed: set[str]) -> None:
        """Drop each fetched shard of which less than half is needed, after copying that part beside it."""
        for shard in [path for path in {t.path for t in self.tensors.values()} if path.is_file()]:
            wanted = [t for t in self.tensors.values() if t.path == shard and t.name in needed]
            if any(t.name not in self.kept for t in wanted):
                if shard not in self.checked or 2 * sum(t.nbytes for t in wanted) > shard.stat().st_size:
                    continue
                self._keep(shard, wanted)
            self.close(shard)
            shard.unlink()

    def _keep(self, shard: Path, tensors: list[TensorInfo]) -> None:
        """Make these tensors, copied from the whole shard, all that its kept file holds."""
        path = shard.with_name(shard.name + KEPT)
        draft = path.with_name(path.name + ".draft")
        header = make_header(path, {t.name: (t.dtype, t.shape) for t in tensors})
        with open(draft, "wb") as file:
            file.write(header.raw)
            for tensor in tensors:
                for block in ranges(shard, tensor.offset, tensor.nbytes, f"tensor {tensor.name!r}", CheckpointError):
                    file.write(block)
            file.flush()
            os.fsync(file.fileno())
        self.close(path)
        os.replace(draft, path)
        for name in [name for name, info in self.kept.items() if info.path == path]:
            del self.kept[name]
        self.kept.update(header.tensors)

    def peek(self, info: TensorInfo, nbytes: int) -> np.ndarray:
        """uint8 [nbytes] from the start of a tensor, by a range where its shard is not here."""
        assert self.repo is not None
        if info.name in self.kept or info.path.is_file():
            return super().peek(info, nbytes)
        found = self.repo.read(self._name(info.path), info.offset, info.offset + nbytes)
        if len(found) != nbytes:
            raise CheckpointError(f"The hub gave {len(found):,} of {nbytes:,} bytes of {info.name}; try again.")
        return np.frombuffer(found, np.uint8)

    def download_bytes(self, names: set[str]) -> int:
        """Bytes of the shards still to fetch before these tensors are read."""
        assert self.repo is not None
        paths = {self.tensors[name].path for name in names if name not in self.kept}
        return sum(self.repo.files[self._name(path)][0] for path in paths if not path.is_file())

    def transient_bytes(self, steps: list[set[str]]) -> int:
        """The most that shards take at once, each counted whole from its first use to its last."""
        assert self.repo is not None
        sizes = {t.path: self.repo.files[self._name(t.path)][0] for t in self.tensors.values()}
        uses = [{self.tensors[name].path for name in names if name not in self.kept} for names in steps]
        first = {path: i for i, paths in reversed(list(enumerate(uses))) for path in paths}
        last = {path: i for i, paths in enumerate(uses) for path in paths}
        spans = [[path for path in first if first[path] <= i <= last[path]] for i in range(len(steps))]
        return max((sum(sizes[path] for path in held) for held in spans), default=0)


def open_hub_checkpoint(name: str, revision: str | None, cache: Path, report: Callable[[int], None]) -> HubCheckpoint:
    """Pin a revision (a branch, tag or commit; the default branch when None) and read its config and headers.

    `report` is told of bytes as they arrive. Small files are downloaded into a folder of that commit in `cache`;
    shards follow when they are read. Raises CheckpointError, ConfigError.
    """
    from huggingface_hub import HfApi

    found = _ask(name, HfApi().model_info, name, revision=revision, files_metadata=True)
    files = {s.rfilename: (s.size or 0, s.lfs.sha256 if s.lfs else s.blob_id or "") for s in found.siblings or []}
    if not re.fullmatch("[0-9a-f]{40}", str(found.sha)):
        raise CheckpointError(f"The hub names commit {found.sha!r} for {name}, which is none; try again later.")
    folder = cache / str(found.sha)
    repo = Repo(name, str(found.sha), files, folder, report)
    if not {INDEX, SINGLE} & set(files):
        refuse_names(name, files)
    if CONFIG not in files or not {INDEX, SINGLE} & set(files):
        raise CheckpointError(f"{name} has no {CONFIG} with {INDEX} or {SINGLE}; name a repository with safetensors.")
    folder.mkdir(parents=True, exist_ok=True)
    for small in verbatim(files) + [INDEX] * (INDEX in files):
        if files[small][0] > VERBATIM_LIMIT:
            raise CheckpointError(f"{small} of {name} is larger than {VERBATIM_LIMIT:,} bytes, which no such file is.")
        repo.fetch(small)
    wanted = indexed(folder) if INDEX in files else [SINGLE]
    missing = [shard for shard in wanted if shard not in files]
    if missing:
        raise CheckpointError(f"{name} lacks {len(missing)} of {len(wanted)} shards ({', '.join(missing[:5])}).")
    headers = [repo.header(shard) for shard in wanted]
    config = read_json(folder / CONFIG)
    tensors = all_tensors(headers)
    refuse_foreign(name, config, tensors)
    parts = [path for path in folder.glob("*" + KEPT) if path.name.removesuffix(KEPT) in wanted]
    kept = {n: info for part in parts for n, info in read_header(part, CheckpointError).tensors.items() if n in tensors}
    return HubCheckpoint(
        folder,
        config,
        model_spec(config, f"{name}/{CONFIG}"),
        tensors,
        fingerprint_of(folder / CONFIG, headers),
        repo.commit,
        {"repo": name, "revision": repo.commit},
        formats_of(headers),
        repo=repo,
        kept=kept,
    )
