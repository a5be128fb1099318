"""The safetensors header, read with every claim checked against the file before anything is allocated, and written."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import StoreError, TTDError
from ..spec import ALIGNMENT, POINTER, align, open_regular, parse_json, pointer_sentence
from .stamp import Stamp, stamp_of

# The largest that is in use, every expert of a 35B apart in block FP8 and in one file, has 62 thousand tensors and
# needs 10 MB. safetensors itself takes 100 MB, which Python's JSON needs 15 s and 1.3 GB for.
HEADER_LIMIT = 32 << 20
FORMAT = "mlx"
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies: `dtype` as safetensors spells it ('BF16', 'U32'), `offset` from the file's start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """The checked header of one file: `raw` is the length field and the JSON, so data starts at len(raw).

    `format` is what the metadata calls it, such as 'pt' or 'mlx'. `stamp` tells whether the file is still the same;
    None where there was no file.
    """

    path: Path
    raw: bytes
    tensors: dict[str, TensorInfo]
    file_bytes: int
    format: str | None = None
    stamp: Stamp | None = field(default=None, compare=False)


def tensor_bytes(dtype: str, shape: Iterable[int]) -> int:
    """Bytes of a tensor of safetensors dtype `dtype`."""
    return math.prod(shape) * ITEM_BYTES[dtype]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name occurs twice")
    return fields


def _natural(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _tensor(path: Path, name: str, entry: Any, start: int, size: int, error: type[TTDError]) -> TensorInfo:
    where = f"{path}: tensor {name[:200]!r}"
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise error(f"{where} lacks a dtype, shape or pair of data_offsets; the file is damaged.") from None
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise error(f"{where} has dtype {dtype!r}; known are {', '.join(ITEM_BYTES)}.")
    if not isinstance(shape, list) or len(shape) > 16 or not all(_natural(n) for n in shape):
        raise error(f"{where} has a malformed shape; the file is damaged.")
    if not (_natural(begin) and _natural(end) and begin <= end):
        raise error(f"{where} has malformed data_offsets; the file is damaged.")
    if end > size - start:
        raise error(
            f"{where} claims {end:,} bytes of data where the file holds {size - start:,}; it is cut short or damaged."
        )
    if tensor_bytes(dtype, shape) != end - begin:
        raise error(f"{where} of {dtype} {shape} does not fill its {end - begin:,} bytes; the file is damaged.")
    return TensorInfo(name, dtype, tuple(shape), path, start + begin, end - begin)


def read_header(path: Path, error: type[TTDError] = StoreError) -> Header:
    """Read and check the header of the safetensors file at `path`; raises `error` naming file and tensor."""
    try:
        with open(open_regular(path), "rb") as file:
            found = os.fstat(file.fileno())
            return replace(parse_header(path, found.st_size, file.read, error), stamp=stamp_of(found))
    except OSError as failure:
        raise error(f"{path} cannot be read: {failure.strerror}.") from None


def parse_header(path: Path, size: int, read: Callable[[int], bytes], error: type[TTDError] = StoreError) -> Header:
    """The checked header of a file of `size` bytes, called `path`; `read` gives its next n bytes."""
    prefix = read(8)
    if POINTER.startswith(prefix) and len(prefix) == 8:
        raise error(pointer_sentence(path))
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > size - 8:
        raise error(f"{path} holds {size:,} bytes and claims a header of {length:,}; it is cut short.")
    if length > HEADER_LIMIT:
        raise error(
            f"{path} claims a header of {length:,} bytes, over the {HEADER_LIMIT:,} that are read; it is damaged."
        )
    text = read(length)
    if len(text) < length:
        raise error(f"{path} ended inside its header; it is cut short.")
    try:
        fields = parse_json(text, _unique)
    except (ValueError, RecursionError) as failure:
        raise error(f"{path} has no valid safetensors header ({failure}); it is damaged.") from None
    if not isinstance(fields, dict):
        raise error(f"{path} has no valid safetensors header (not an object); it is damaged.")
    metadata = fields.pop("__metadata__", None)
    said = metadata.get("format") if isinstance(metadata, dict) else None
    start = 8 + length
    tensors = {name: _tensor(path, name, entry, start, size, error) for name, entry in fields.items()}
    end = start
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset < end:
            raise error(f"{path}: tensor {tensor.name!r} overlaps another; the file is damaged.")
        end = tensor.offset + tensor.nbytes
    return Header(path, prefix + text, tensors, size, said if isinstance(said, str) else None)


def make_header(
    path: Path,
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    data_start: int | None = None,
    metadata: Mapping[str, str] = {"format": FORMAT},
) -> Header:
    """Lay out a file of `tensors` (name -> dtype, shape); data starts at `data_start` or the next `ALIGNMENT`."""
    fields: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        end = offset + tensor_bytes(dtype, shape)
        fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    start = align(8 + len(text), ALIGNMENT) if data_start is None else data_start
    raw = (start - 8).to_bytes(8, "little") + text.ljust(start - 8)
    if len(raw) != start:
        raise StoreError(f"{path} needs a header of {len(raw):,} bytes where data starts at {start:,}.")
    infos = {
        name: TensorInfo(name, dtype, shape, path, start + fields[name]["data_offsets"][0], tensor_bytes(dtype, shape))
        for name, (dtype, shape) in tensors.items()
    }
    return Header(path, raw, infos, start + offset, FORMAT)
