"""An opened store: every claim of its manifest and headers checked against the files, no weights read."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import ConfigError, RecordError, StoreError
from ..spec import (
    ALIGNMENT,
    CONFIG_BYTES,
    FULL,
    ModelSpec,
    Quantisation,
    RecordLayout,
    absolute_path,
    json_object,
    model_spec,
    read_small,
    require_regular,
)
from .digest import file_digest, sha256
from .file_ranges import opened, read_into
from .format import (
    CONFIG,
    EMBEDDING,
    MANIFEST,
    MANIFEST_BYTES,
    MTP,
    MTP_EXPERTS,
    PLAIN_DTYPES,
    RECORDS,
    RECORDS_START,
    RESIDENT,
    VERBATIM,
    Norms,
    expert_file,
    parts,
    store_files,
    tensors_of,
)
from .links import refuse_links_out
from .manifest import FileEntry, Manifest
from .manifest_check import check_version, parse_manifest, stored_spec
from .safetensors_file import Header, TensorInfo, read_header
from .stamp import Stamp

MX_DTYPES = {"F32": mx.float32, "BF16": mx.bfloat16, "F16": mx.float16, "U32": mx.uint32, "U8": mx.uint8}
WORDS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32}


@dataclass(frozen=True)
class Store:
    """A checked store. `resident` and `embedding` map part names ('layers.3.attn.q.scales') to places in files.

    `path` is absolute; `stamps` tells what each tensor file was when its header was read.
    """

    path: Path
    spec: ModelSpec
    config: dict[str, Any]
    manifest: Manifest
    digest: str
    resident: dict[str, TensorInfo]
    embedding: dict[str, TensorInfo]
    mtp: MTPStore | None = None
    stamps: dict[Path, Stamp] = field(default_factory=dict, repr=False)
    follow_links: bool = False

    @property
    def norms(self) -> Norms:
        """Whether norm weights are stored as w or as 1 + w."""
        return self.manifest.norms

    @property
    def layouts(self) -> tuple[RecordLayout | None, ...]:
        """The record layout of each trunk layer; None where the layer has no experts."""
        return self.manifest.layouts

    @property
    def resident_bytes(self) -> int:
        """Bytes of the weights that every token uses."""
        return sum(info.nbytes for info in self.resident.values())

    @property
    def expert_bytes(self) -> int:
        """Bytes of the records of one expert a layer, over all layers."""
        return sum(layout.stride for layout in self.layouts if layout is not None)

    def expert_file(self, layer: int) -> tuple[Path, int, int]:
        """(file, offset of the first record, number of records) of a trunk layer."""
        return self.path / expert_file(layer), RECORDS_START, self.spec.experts

    def record_digest(self, layer: int, expert: int) -> str:
        """Hex SHA-256 of one expert record of a trunk layer."""
        records = self.manifest.files[expert_file(layer)].records
        assert records is not None
        return records[expert]

    def quantisation(self, name: str) -> Quantisation | None:
        """How the dense tensor `name` is packed; None when it is stored plain."""
        return self.manifest.quantisation.get(name)


@dataclass(frozen=True)
class MTPStore(Store):
    """The multi-token-prediction layer, seen as a store of one full-attention layer; names lose their 'mtp.'."""

    @property
    def layouts(self) -> tuple[RecordLayout | None, ...]:
        """The record layout of the one layer; None in a dense model."""
        return (self.manifest.mtp_layout,)

    def expert_file(self, layer: int = 0) -> tuple[Path, int, int]:
        """(file, offset of the first record, number of records)."""
        return self.path / MTP_EXPERTS, RECORDS_START, self.spec.experts

    def record_digest(self, layer: int, expert: int) -> str:
        """Hex SHA-256 of one expert record."""
        records = self.manifest.files[MTP_EXPERTS].records
        assert records is not None
        return records[expert]

    def quantisation(self, name: str) -> Quantisation | None:
        """How the dense tensor `name` is packed; None when it is stored plain."""
        return self.manifest.quantisation.get("mtp." + name)


def read_tensor(info: TensorInfo) -> mx.array:
    """Read one tensor as an evaluated array of its stored dtype and shape. Raises StoreError on a short read.

    The file is read straight into the array's memory; on a CUDA device it is staged, since a host view would move the
    buffer to managed memory for good.
    """
    dtype = MX_DTYPES[info.dtype]
    # In words of its own, since MLX's shapes count to 2^31 in each dimension.
    count = info.nbytes // dtype.size
    with opened(info.path) as fd:
        if mx.default_device() == mx.gpu and mx.cuda.is_available():
            staging = np.empty(count, f"u{dtype.size}")
            read_into(fd, staging.view(np.uint8).data, info.offset, info.path, f"tensor {info.name!r}")
            raw = mx.array(staging)
        else:
            raw = mx.zeros(count, WORDS[dtype.size])
            mx.eval(raw)
            buffer = memoryview(raw).cast("B")  # type: ignore[arg-type]
            read_into(fd, buffer, info.offset, info.path, f"tensor {info.name!r}")
    array = raw.view(dtype).reshape(info.shape)
    mx.eval(array)
    return array


def _header(root: Path, name: str, entry: FileEntry) -> Header:
    path = root / name
    if not os.path.lexists(path):
        raise StoreError(f"{path} is missing; copy the store again, whole.")
    header = read_header(path)
    if header.file_bytes != entry.bytes:
        raise StoreError(
            f"{path} holds {header.file_bytes:,} bytes where the manifest says {entry.bytes:,}; copy it again, whole."
        )
    start = len(header.raw)
    if start % ALIGNMENT or start + sum(t.nbytes for t in header.tensors.values()) != header.file_bytes:
        raise StoreError(
            f"{path} has data that starts at byte {start:,}, no multiple of {ALIGNMENT}, or bytes that belong to no "
            "tensor; convert the checkpoint again."
        )
    return header


def _check_digests(header: Header, entry: FileEntry) -> None:
    if sha256(header.raw) != entry.header:
        raise StoreError(f"{header.path}: the header does not match its digest; copy the file again.")
    if file_digest(header.raw, entry.part_digests()) != entry.digest:
        raise StoreError(
            f"{header.path}: the manifest's digests of its parts do not match the file's; copy the store again."
        )


def _dense_file(root: Path, name: str, manifest: Manifest, spec: ModelSpec) -> Header:
    entry = manifest.files[name]
    header = _header(root, name, entry)
    expected: set[str] = set()
    for tensor in tensors_of(spec, name):
        q = manifest.quantisation.get(tensor.name)
        found = header.tensors.get(tensor.name)
        plain = found.dtype if found and found.dtype in PLAIN_DTYPES else PLAIN_DTYPES[0]
        for part, (dtype, shape) in parts(tensor.name, tensor.shape, q, plain).items():
            got = header.tensors.get(part)
            if got is None:
                raise StoreError(f"{header.path} lacks tensor {part!r}; convert the checkpoint again.")
            if (got.dtype, got.shape) != (dtype, shape):
                raise StoreError(
                    f"{header.path}: {part!r} is {got.dtype} {list(got.shape)} where config.json and the manifest "
                    f"need {dtype} {list(shape)}; convert the checkpoint again."
                )
            expected.add(part)
    if set(header.tensors) != expected or set(entry.tensors or ()) != expected:
        raise StoreError(f"{header.path} and the manifest do not list the same tensors; convert the checkpoint again.")
    _check_digests(header, entry)
    return header


def _expert_file(root: Path, name: str, entry: FileEntry, layout: RecordLayout, spec: ModelSpec) -> Header:
    header = _header(root, name, entry)
    info = header.tensors.get(RECORDS)
    if (
        info is None
        or len(header.tensors) != 1
        or info.dtype != "U8"
        or len(info.shape) != 2
        or info.offset != RECORDS_START
    ):
        raise RecordError(f"{header.path} is no expert file; convert the checkpoint again.")
    if info.shape[0] != spec.experts or len(entry.records or ()) != spec.experts:
        raise RecordError(
            f"{header.path} holds {info.shape[0]} experts where config.json says num_experts {spec.experts}; "
            "restore the config.json that belongs to this store."
        )
    if info.shape[1] != layout.stride:
        raise RecordError(
            f"{header.path} has records of {info.shape[1]:,} bytes where the manifest says {layout.stride:,}."
        )
    _check_digests(header, entry)
    return header


def _copied_names(root: Path) -> list[str]:
    """The files of a store that are not its own, whether they are there or not."""
    return [*VERBATIM, *(path.relative_to(root).as_posix() for path in root.glob("additional_chat_templates/*"))]


def open_store(path: str | os.PathLike[str], follow_links: bool = False) -> Store:
    """Open a store: check its manifest, config, and each file's size and header. Raises StoreError, ConfigError.

    follow_links: whether links in it may lead outside it.
    """
    root = absolute_path(path)
    if not os.path.lexists(root / MANIFEST):
        reason = "is not a store: it has no manifest.json" if root.is_dir() else "does not exist"
        raise StoreError(f"{root} {reason}; make a store with `mlx-ttd convert CHECKPOINT STORE`.")
    copied = _copied_names(root)
    if not follow_links:
        refuse_links_out(root, (MANIFEST, *copied))
    for name in copied:
        require_regular(root / name, StoreError)
    hint = "copy the store again, whole"
    written = read_small(root / MANIFEST, MANIFEST_BYTES, StoreError, hint)
    try:
        data = json_object(written, root / MANIFEST)
    except ConfigError as error:
        raise StoreError(str(error)) from None
    check_version(data, str(root / MANIFEST))
    raw_config = read_small(root / CONFIG, CONFIG_BYTES, ConfigError, hint)
    config = json_object(raw_config, root / CONFIG)
    spec = stored_spec(data, model_spec(config, str(root / CONFIG)))
    manifest = parse_manifest(data, spec, str(root / MANIFEST))
    if not follow_links:
        refuse_links_out(root, manifest.files)
    headers = {}
    layouts = {expert_file(layer): layout for layer, layout in enumerate(manifest.layouts)}
    for name, layout in (layouts | {MTP_EXPERTS: manifest.mtp_layout}).items():
        if layout is not None:
            headers[name] = _expert_file(root, name, manifest.files[name], layout, spec)
    for name, layer in store_files(spec, manifest.mtp).items():
        if layer is None:
            headers[name] = _dense_file(root, name, manifest, spec)
    if sha256(raw_config) != manifest.copied[CONFIG].sha256:
        raise StoreError(
            f"{root / CONFIG} does not match its digest; restore the config.json that belongs to this store."
        )
    digest = sha256(written)
    stamps = {header.path: header.stamp for header in headers.values() if header.stamp is not None}
    resident, embedding = headers[RESIDENT].tensors, headers[EMBEDDING].tensors if EMBEDDING in headers else {}
    store = Store(root, spec, config, manifest, digest, resident, embedding, None, stamps, follow_links)
    if not manifest.mtp:
        return store
    one_layer = replace(spec, layer_types=(FULL,))
    names = {name.removeprefix("mtp."): info for name, info in headers[MTP].tensors.items()}
    own = sha256(f"{digest} mtp".encode())
    mtp = MTPStore(root, one_layer, config, manifest, own, names, {}, None, stamps, follow_links)
    return replace(store, mtp=mtp)
