"""Converting a checkpoint to a store: streamed in bounded ranges, resumable, named only when complete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import ExitStack
from pathlib import Path

from ..errors import ConversionError, OptionError
from ..kernels import require_unforked
from ..spec import model_spec, read_small, user_path
from .checkpoint import Checkpoint, open_checkpoint
from .checkpoint_files import plain_file, verbatim_names
from .digest import sha256
from .format import MANIFEST, VERBATIM_LIMIT, Norms
from .hub import is_hub_id, open_hub_checkpoint
from .journal import Journal
from .manifest import Copied, FileEntry, Manifest
from .own_head import with_own_head
from .pieces import pieces
from .pipeline import array_workers, behind
from .plan import Plan, PlannedFile, make_plan
from .policy import load_policy
from .progress import Meter, Progress
from .sources import Sources, match
from .writer import FileWriter

SPARE_BYTES = 64 << 20


def _write(checkpoint: Checkpoint, file: PlannedFile, writer: FileWriter, workers: Executor, meter: Meter) -> None:
    with behind(writer.put) as put, behind(writer.digest) as digest:
        for part, position, data in pieces(checkpoint, file, workers):
            put(part, position, data)
            digest(part, data)
            meter.advance(len(data))


def _copy_verbatim(checkpoint: Checkpoint, root: Path) -> dict[str, Copied]:
    copied = {}
    for name in verbatim_names(checkpoint.path):
        source = plain_file(checkpoint.path, name)
        if source is None:
            continue
        data = read_small(source, VERBATIM_LIMIT, ConversionError, "copy it from the model again")
        (root / name).parent.mkdir(exist_ok=True)
        _write_durably(root / name, data)
        copied[name] = Copied(len(data), sha256(data))
    return copied


def _write_durably(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _check_space(needed: int, where: Path) -> None:
    free = shutil.disk_usage(where).free
    if free < needed:
        raise ConversionError(
            f"{where} has {free / 1e9:.2f} GB free; the store needs {needed / 1e9:.2f} GB more: free some space."
        )


def _manifest(checkpoint: Checkpoint, sources: Sources, plan: Plan, policy: str) -> Manifest:
    layouts = [file.layout for file in plan.files.values() if file.layout is not None]
    layers = len(checkpoint.spec.layer_types)
    trunk = layouts[:layers] if checkpoint.spec.is_moe else [None] * layers
    return Manifest(
        source={**checkpoint.origin, "importer": sources.importer, "fingerprint": checkpoint.fingerprint},
        policy=policy,
        norms=sources.norms,
        quantisation=plan.quantisation(),
        layouts=tuple(trunk),
        mtp=sources.mtp,
        mtp_layout=layouts[layers] if sources.mtp and checkpoint.spec.is_moe else None,
        files={},
        copied={},
        tied=None if checkpoint.spec.tied == model_spec(checkpoint.config).tied else checkpoint.spec.tied,
    )


def _write_files(
    checkpoint: Checkpoint, plan: Plan, journal: Journal, identity: str, meter: Meter
) -> dict[str, FileEntry]:
    done = journal.resume(identity, plan)
    # Experts first, so that a source fetched shard by shard can drop each shard but for its few dense tensors.
    waiting = sorted(
        (name for name in plan.files if name not in done), key=lambda name: plan.files[name].layout is None
    )
    needs = [plan.files[name].source_names() for name in waiting]
    left = sum(plan.files[name].header.file_bytes for name in waiting)
    _check_space(left + checkpoint.transient_bytes(needs) + SPARE_BYTES, journal.store)
    downloads = checkpoint.download_bytes(set().union(*needs))
    meter.begin(plan.total_bytes + downloads, plan.total_bytes - left)

    def finish(name: str, writer: FileWriter) -> None:
        done[name] = writer.finish()
        writer.close()
        journal.record(name, done[name])

    with ExitStack() as writers, array_workers() as workers, behind(finish, 1) as finish_later:
        for i, name in enumerate(waiting):
            checkpoint.release(set().union(*needs[i:]))
            meter.current = name
            writer = FileWriter(plan.files[name].header)
            writers.callback(writer.close)
            _write(checkpoint, plan.files[name], writer, workers, meter)
            # The next file is read while this one becomes durable.
            finish_later(name, writer)
    return {name: done[name] for name in plan.files}


def _open(src: str | os.PathLike[str], revision: str | None, journal: Journal, meter: Meter) -> Checkpoint:
    if is_hub_id(src):
        return open_hub_checkpoint(str(src), revision, journal.source, meter.advance)
    if revision is not None:
        raise OptionError(f"revision {revision!r} is of use with a hub id alone, and {src} is none.")
    return open_checkpoint(src)


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    policy: str | Path | None = None,
    head_bits: int | None = None,
    embed_bits: int | None = None,
    progress: Callable[[Progress], None] | None = None,
    revision: str | None = None,
    norms: Norms | None = None,
) -> Path:
    """Convert the checkpoint `src`, a directory or a hub id at `revision`, to the store directory `dst`.

    What is already quantised keeps its bits; the rest follows `policy` (a bundled name or a JSON file; None is "int4",
    and leaves plain what a quantised checkpoint left so), `head_bits` and `embed_bits` (16, 8 or 4). norms: what the
    norms hold, "w" or "1+w", where their values leave it open. Work goes on in '<dst>.partial'; the same call after an
    interruption resumes there and gives the same bytes. Raises CheckpointError, ConversionError, OptionError,
    ConfigError.
    """
    require_unforked()
    if norms not in (None, "w", "1+w"):
        raise OptionError(f"norms is {norms!r}; give 'w' or '1+w', or leave it out.")
    target = user_path(dst)
    if os.path.lexists(target):
        raise ConversionError(f"{target} exists already; give another name or remove it.")
    partial = target.with_name(target.name + ".partial")
    try:
        meter = Meter(progress)
        with Journal(partial) as journal, _open(src, revision, journal, meter) as found:
            checkpoint = with_own_head(found)
            chosen = load_policy(policy, head_bits, embed_bits, checkpoint.spec.tied)
            sources = match(checkpoint, norms)
            plan = make_plan(checkpoint, sources, chosen, journal.store)
            manifest = _manifest(checkpoint, sources, plan, chosen.name)
            identity = sha256(f"{checkpoint.state}\n{manifest.to_text()}".encode())
            manifest.files.update(_write_files(checkpoint, plan, journal, identity, meter))
            manifest.copied.update(_copy_verbatim(checkpoint, journal.store))
            _write_durably(journal.store / MANIFEST, manifest.to_text().encode())
            journal.publish(target)
            meter.finish()
    except OSError as failure:
        raise ConversionError(
            f"Writing {target} stopped: {failure.strerror or failure}. Calling again resumes from {partial}."
        ) from None
    return target
