"""What a conversion will write: every file with its header, each tensor's source and its form in the store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError
from ..spec import Quantisation, RecordLayout, mtp_tensors, record_layout, trunk_tensors
from .checkpoint import Checkpoint
from .encodings import Packed
from .format import GROUPS, MTP_EXPERTS, RECORDS, RECORDS_START, check_quantisation, parts, store_files, tensors_of
from .policy import Policy, policy_role
from .quantise import stored_dtype
from .safetensors_file import Header, make_header
from .source import Source
from .sources import LISTED, Sources

PLAIN_EXPERTS = "it is plain where others are packed, and a store keeps experts packed; name a policy to pack it by"


@dataclass(frozen=True)
class PlannedTensor:
    """One model tensor: where it comes from and how the store packs it (None: plain)."""

    source: Source
    target: Quantisation | None


@dataclass(frozen=True)
class PlannedFile:
    """One file to write: dense tensors, or (gate_up, down) with the layout of their records."""

    header: Header
    tensors: list[PlannedTensor]
    layout: RecordLayout | None

    def source_names(self) -> set[str]:
        """The source tensors that the file is made of."""
        return {name for planned in self.tensors for name in planned.source.names()}


@dataclass(frozen=True)
class Plan:
    """All files by name, in the order of writing."""

    files: dict[str, PlannedFile]

    @property
    def total_bytes(self) -> int:
        return sum(file.header.file_bytes for file in self.files.values())

    def quantisation(self) -> dict[str, Quantisation]:
        """How the packed dense tensors are packed, by name."""
        dense = [t for file in self.files.values() if file.layout is None for t in file.tensors]
        return {t.source.tensor.name: t.target for t in dense if t.target is not None}


def _forms(cols: int, bits: int) -> str:
    """What rows of `cols` values can be packed by instead."""
    groups = [group for group in GROUPS if cols % group == 0]
    if not groups:
        return f"no group of {', '.join(map(str, GROUPS))} divides them; a policy may keep all but experts 'stored'"
    return f"int{bits} can be had in groups of {' or '.join(map(str, groups))}" + (
        ", as by policy 'int4-g32'" if bits == 4 and groups[0] == 32 else ""
    )


def _target(source: Source, policy: Policy, quantised: bool) -> tuple[Quantisation | None, str | None]:
    """The form of a tensor in the store, and why it cannot have it, if it cannot.

    quantised: whether the checkpoint packs others; what it left plain then stays so unless a policy was asked for.
    """
    tensor, encoding = source.tensor, source.encoding
    if tensor.kind not in ("matrix", "experts"):
        return None, None if policy.target(
            tensor
        ) is None else f"policy {policy.name!r} packs {tensor.role}, which is no matrix"
    if isinstance(encoding, Packed) and policy_role(tensor) not in policy.forced:
        return encoding.quantisation, None
    target = policy.target(tensor)
    if quantised and not policy.asked and policy_role(tensor) not in policy.forced:
        return None, PLAIN_EXPERTS if tensor.kind == "experts" else None
    if target is None:
        return None, f"policy {policy.name!r} leaves {tensor.role} unpacked" if tensor.kind == "experts" else None
    reason = check_quantisation(target, cols := tensor.shape[-1])
    return target, reason and f"{reason}; {_forms(cols, target.bits)}"


def make_plan(checkpoint: Checkpoint, sources: Sources, policy: Policy, root: Path) -> Plan:
    """Lay out every file of the store under `root`. Raises CheckpointError listing what cannot be packed."""
    problems, targets = [], {}
    quantised = any(isinstance(source.encoding, Packed) for source in sources.tensors.values())
    for name, source in sources.tensors.items():
        targets[name], problem = _target(source, policy, quantised)
        if problem:
            problems.append(f"{name}: {problem}")
    if problems:
        more = f"; and {len(problems) - LISTED} more" if len(problems) > LISTED else ""
        raise CheckpointError(f"{checkpoint.path} cannot be packed as asked: {'; '.join(problems[:LISTED])}{more}.")
    spec, files = checkpoint.spec, {}
    for file, layer in store_files(spec, sources.mtp).items():
        listed = mtp_tensors(spec) if file == MTP_EXPERTS else trunk_tensors(spec)
        tensors = (
            tensors_of(spec, file) if layer is None else [t for t in listed if t.kind == "experts" and t.layer == layer]
        )
        planned = [PlannedTensor(sources.tensors[t.name], targets[t.name]) for t in tensors]
        layout = None
        if layer is None:
            entries = [
                parts(t.source.tensor.name, t.source.tensor.shape, t.target, stored_dtype(t.source.encoding))
                for t in planned
            ]
            header = make_header(root / file, {name: entry for part in entries for name, entry in part.items()})
        else:
            gate_up, down = (t.target for t in planned)
            assert gate_up is not None
            assert down is not None
            layout = record_layout(spec.hidden, spec.inter, gate_up, down)
            header = make_header(root / file, {RECORDS: ("U8", (spec.experts, layout.stride))}, RECORDS_START)
        files[file] = PlannedFile(header, planned, layout)
    return Plan(files)
