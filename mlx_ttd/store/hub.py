"""A checkpoint on the Hugging Face hub, read as if it lay in a directory; its shards come and go, each checked."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event

import numpy as np

from ..errors import CheckpointError
from ..spec import model_spec, read_json
from .checkpoint import INDEX, INDEX_BYTES, Checkpoint, all_tensors, fingerprint_of, formats_of, indexed
from .digest import range_digest, sha256
from .file_ranges import ranges
from .foreign import refuse_foreign, refuse_names
from .format import CONFIG, VERBATIM_LIMIT, verbatim
from .hub_listing import list_files
from .hub_patience import FIRST_TRIES, Patience
from .hub_repo import Repo
from .hub_transfer import Remote
from .safetensors_file import Header, TensorInfo, make_header, read_header

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
SINGLE, KEPT = "model.safetensors", ".kept"
SMALL_BYTES, MOST_SHARDS, HEADERS_BYTES = 16 << 20, 4096, 256 << 20
LIMITS = {"tokenizer.json": VERBATIM_LIMIT, INDEX: INDEX_BYTES}


def is_hub_id(source: str | os.PathLike[str]) -> bool:
    """Whether `source` means OWNER/NAME on the hub: it has that form, nothing lies there, and it names no *.ttd."""
    return bool(HUB_ID.fullmatch(str(source))) and Path(source).suffix != ".ttd" and not os.path.exists(source)


@dataclass(frozen=True)
class HubCheckpoint(Checkpoint):
    """Shards are fetched when first read; once less than half of one is needed, only that part stays.

    `prefixes` has length and SHA-256 of the header that each shard's tensors were found by.
    """

    repo: Repo | None = None
    prefixes: dict[Path, tuple[int, str]] = field(default_factory=dict)
    kept: dict[str, TensorInfo] = field(default_factory=dict)
    checked: set[Path] = field(default_factory=set)

    def __exit__(self, *_: object) -> None:
        self.stop()
        super().__exit__()

    def stop(self) -> None:
        """End what is being read from the hub, at once, with a CheckpointError there."""
        assert self.repo is not None
        self.repo.remote.patience.stopped.set()

    def _name(self, shard: Path) -> str:
        return shard.relative_to(self.path).as_posix()

    def read(self, info: TensorInfo, start: int, nbytes: int) -> np.ndarray:
        """uint8 [nbytes] from byte `start` of a tensor, after fetching its shard when that is not there."""
        assert self.repo is not None
        info = self.kept.get(info.name, info)
        if info.name not in self.kept and info.path not in self.checked:
            self._fetch(info.path)
        return super().read(info, start, nbytes)

    def _fetch(self, shard: Path) -> None:
        assert self.repo is not None
        path = self.repo.fetch(self._name(shard))
        length, digest = self.prefixes[shard]
        if range_digest(path, 0, length, "the header", CheckpointError) != digest:
            raise CheckpointError(f"{path} has another header than the hub gave for it before; try again later.")
        self.checked.add(shard)

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
        return sum(self.repo.size(self._name(path)) for path in paths if not path.is_file())

    def transient_bytes(self, steps: list[set[str]]) -> int:
        """The most that shards take at once, each counted whole from its first use to its last."""
        assert self.repo is not None
        sizes = {t.path: self.repo.size(self._name(t.path)) for t in self.tensors.values()}
        uses = [{self.tensors[name].path for name in names if name not in self.kept} for names in steps]
        first = {path: i for i, paths in reversed(list(enumerate(uses))) for path in paths}
        last = {path: i for i, paths in enumerate(uses) for path in paths}
        spans = [[path for path in first if first[path] <= i <= last[path]] for i in range(len(steps))]
        return max((sum(sizes[path] for path in held) for held in spans), default=0)


def _small_files(repo: Repo) -> None:
    """Fetch the files beside the shards, none larger than such a file is."""
    for name in verbatim(repo.files) + [INDEX] * (INDEX in repo.files):
        limit = LIMITS.get(name, SMALL_BYTES)
        if repo.size(name) > limit:
            raise CheckpointError(
                f"{name} of {repo.remote.repo} is larger than {limit:,} bytes, which no such file is."
            )
        repo.fetch(name)


def _headers(repo: Repo, shards: list[str]) -> list[Header]:
    missing = [shard for shard in shards if shard not in repo.files]
    if missing:
        raise CheckpointError(
            f"{repo.remote.repo} lacks {len(missing)} of {len(shards)} shards ({', '.join(missing[:5])})."
        )
    if len({shard.casefold() for shard in shards}) < len(shards) or len(shards) > MOST_SHARDS:
        raise CheckpointError(f"{repo.remote.repo} has more than {MOST_SHARDS:,} shards, or two whose names are alike.")
    headers: list[Header] = []
    for shard in shards:
        headers.append(repo.header(shard))
        if sum(len(header.raw) for header in headers) > HEADERS_BYTES:
            raise CheckpointError(f"The headers of {repo.remote.repo} take more than {HEADERS_BYTES:,} bytes.")
    return headers


def open_hub_checkpoint(
    name: str, revision: str | None, cache: Path, report: Callable[[int], None], patience: Patience | None = None
) -> HubCheckpoint:
    """Pin a revision (a branch, tag or commit; the default branch when None) and read its config and headers.

    `report` is told of bytes as they arrive. Small files are downloaded into a folder of that commit in `cache`;
    shards follow when they are read. Raises CheckpointError, ConfigError.
    """
    patience = replace(patience or Patience(), stopped=Event())
    commit, files = list_files(Remote(name, revision, replace(patience, tries=min(FIRST_TRIES, patience.tries))))
    folder = cache / commit
    repo = Repo(Remote(name, commit, patience), files, folder, report)
    if not {INDEX, SINGLE} & set(files):
        refuse_names(name, files)
    if CONFIG not in files or not {INDEX, SINGLE} & set(files):
        raise CheckpointError(f"{name} has no {CONFIG} with {INDEX} or {SINGLE}; name a repository with safetensors.")
    folder.mkdir(parents=True, exist_ok=True)
    _small_files(repo)
    wanted = indexed(folder) if INDEX in files else [SINGLE]
    headers = _headers(repo, wanted)
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
        commit,
        {"repo": name, "revision": commit},
        formats_of(headers),
        repo=repo,
        prefixes={header.path: (len(header.raw), sha256(header.raw)) for header in headers},
        kept=kept,
    )
