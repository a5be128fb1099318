"""Matching a checkpoint to its model: the rows that make each tensor, or one error that lists all that is wrong."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from ..errors import CheckpointError
from ..spec import Tensor, mtp_tensors, trunk_tensors
from .checkpoint import Checkpoint
from .encodings import Mismatch, Packed, Plain, all_companions, encoding_of
from .format import Norms
from .importers import Importer, Rows, importer_for
from .norms import norms_of
from .overrides import contradiction, unpacked
from .source import Source

VISION = ("model.visual.", "visual.", "vision_tower.", "model.vision_tower.")
MTP = "mtp."
LISTED = 20


@dataclass(frozen=True)
class Sources:
    """Every tensor of the trunk and, when the checkpoint has one, of the MTP layer, by store name."""

    importer: str
    norms: Norms
    mtp: bool
    tensors: dict[str, Source]


@dataclass(frozen=True)
class _Prefixes:
    """What stands in the checkpoint before the names of the trunk, the head and the MTP layer."""

    trunk: str
    head: str
    mtp: str | None

    def of(self, tensor: Tensor) -> str:
        if tensor.name == "head":
            return self.head
        base = self.trunk if self.mtp is None or not tensor.name.startswith(MTP) else self.mtp
        return f"{base}layers.{tensor.layer}." if tensor.layer is not None else base


def _before(names: Iterable[str], ending: str) -> str | None:
    """What precedes `ending` in the shortest name that ends with it at a dot."""
    found = [n.removesuffix(ending) for n in names if n == ending or n.endswith("." + ending)]
    return min(found, key=len, default=None)


def _prefixes(checkpoint: Checkpoint, importer: Importer) -> _Prefixes:
    names = [n for n in checkpoint.tensors if not n.startswith(VISION)]
    trunk = _before(names, importer.paths["embedding"])
    if trunk is None:
        raise CheckpointError(
            f"{checkpoint.path} has no tensor '*{importer.paths['embedding']}'; it is no language model."
        )
    mtp = _before(names, MTP + importer.paths["mtp.fc"])
    return _Prefixes(trunk, _before(names, importer.paths["head"]) or "", None if mtp is None else mtp + MTP)


def _resolve(checkpoint: Checkpoint, importer: Importer, tensor: Tensor, prefix: str) -> Source:
    moves = importer.alternatives(checkpoint.spec, tensor)
    present = [m for m in moves if all(prefix + rows.name in checkpoint.tensors for rows in m)]
    if not present:
        partial = [m for m in moves if any(prefix + rows.name in checkpoint.tensors for rows in m)] or moves
        missing = [prefix + rows.name for rows in partial[0] if prefix + rows.name not in checkpoint.tensors]
        raise Mismatch(f"{tensor.name} needs {missing[0]}" + (f" and {len(missing) - 1} more" if missing[1:] else ""))
    failures = []
    for move in present:
        try:
            return _source(checkpoint, tensor, tuple(Rows(prefix + r.name, r.shape, r.start, r.stop) for r in move))
        except Mismatch as reason:
            failures.append(reason)
    raise failures[0]


def _source(checkpoint: Checkpoint, tensor: Tensor, rows: tuple[Rows, ...]) -> Source:
    encodings = {name: encoding_of(checkpoint, name, shape) for name, shape in {r.name: r.shape for r in rows}.items()}
    if len(set(encodings.values())) > 1:
        raise Mismatch(f"{tensor.name} is made of tensors in different precisions, from {rows[0].name} on")
    encoding = encodings[rows[0].name]
    modules = [name.removesuffix(".weight") for name in encodings]
    reasons = [unpacked(checkpoint.config, module) for module in modules] if isinstance(encoding, Plain) else []
    if isinstance(encoding, Packed):
        if tensor.kind not in ("matrix", "experts"):
            raise Mismatch(f"{rows[0].name} is packed where {tensor.role} is needed plain")
        reasons = [contradiction(checkpoint.config, module, encoding.quantisation) for module in modules]
    if any(reasons):
        raise Mismatch(next(filter(None, reasons)))
    return Source(tensor, rows, encoding, tuple(accumulate(r.stop - r.start for r in rows)))


def match(checkpoint: Checkpoint, norms: Norms | None = None) -> Sources:
    """Find every tensor of the model in the checkpoint. Raises one CheckpointError that lists all that is wrong.

    norms: what the norms hold, where the caller knows; else it is told from their values.
    """
    importer = importer_for(checkpoint)
    prefixes = _prefixes(checkpoint, importer)
    wanted = trunk_tensors(checkpoint.spec) + (mtp_tensors(checkpoint.spec) if prefixes.mtp else [])
    problems, found = [], {}
    claimed = set(all_companions(prefixes.head + importer.paths["head"])) if checkpoint.spec.tied else set()
    for tensor in wanted:
        try:
            source = found[tensor.name] = _resolve(checkpoint, importer, tensor, prefixes.of(tensor))
            claimed |= source.names()
        except Mismatch as reason:
            untied = tensor.name == "head" and ", since config.json does not tie the head to the embedding"
            problems.append(f"{reason}{untied or ''}")
            moves, prefix = importer.alternatives(checkpoint.spec, tensor), prefixes.of(tensor)
            parts = (part for move in moves for rows in move for part in all_companions(prefix + rows.name))
            claimed |= {part for part in parts if part in checkpoint.tensors}
    extra = [n for n in checkpoint.tensors if n not in claimed and not n.startswith(VISION)]
    problems += [f"no role takes {name}" for name in sorted(extra)]
    if problems:
        listed = "; ".join(problems[:LISTED]) + (
            f"; and {len(problems) - LISTED} more" if len(problems) > LISTED else ""
        )
        raise CheckpointError(f"{checkpoint.path} does not hold the model of its config.json: {listed}.")
    return Sources(importer.name, norms or norms_of(checkpoint, found), prefixes.mtp is not None, found)
