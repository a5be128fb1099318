"""How a source tensor's rows are encoded: plain, packed by MLX (affine, mxfp4), or FP8 with one scale per block."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..spec import Quantisation
from .checkpoint import Checkpoint
from .format import PLAIN_DTYPES, SCALE_DTYPES, check_quantisation
from .fp8_block import BLOCK, SCALES, decode, scale_shape
from .safetensors_file import ITEM_BYTES, TensorInfo

Bytes = np.ndarray  # uint8 [rows, bytes of a row]


@dataclass(frozen=True)
class Plain:
    """Rows of F32, BF16 or F16 values."""

    dtype: str


@dataclass(frozen=True)
class FP8:
    """Rows of e4m3 codes with one scale per 128 x 128 block in '<name>_scale_inv'; decoded to BF16."""

    dtype: str = "BF16"


@dataclass(frozen=True)
class Packed:
    """Rows of MLX codes beside '<module>.scales' and, affine only, '<module>.biases'."""

    quantisation: Quantisation


Encoding = Plain | Packed | FP8


class Mismatch(Exception):
    """Why a source tensor cannot be what its role needs."""


def companions(name: str, encoding: Encoding) -> list[str]:
    """The source tensors that hold the rows of `name`, its own first."""
    if isinstance(encoding, Plain):
        return [name]
    if isinstance(encoding, FP8):
        return [name, name + "_scale_inv"]
    module = name.removesuffix(".weight")
    return [name, module + ".scales"] + ([module + ".biases"] if encoding.quantisation.mode == "affine" else [])


def all_companions(name: str) -> list[str]:
    """Every name under which `companions` could look for parts of `name`."""
    module = name.removesuffix(".weight")
    return [name, name + "_scale_inv", module + ".scales", module + ".biases"]


def _shape(info: TensorInfo, wanted: tuple[int, ...]) -> None:
    if info.shape != wanted:
        raise Mismatch(f"{info.name} is {list(info.shape)} where {list(wanted)} is needed")


def _packed(checkpoint: Checkpoint, info: TensorInfo, shape: tuple[int, ...]) -> Packed:
    module = info.name.removesuffix(".weight")
    scales, biases = checkpoint.tensors[module + ".scales"], checkpoint.tensors.get(module + ".biases")
    *lead, cols = shape
    if info.dtype != "U32" or len(info.shape) != len(shape) or len(scales.shape) != len(shape) or not scales.shape[-1]:
        raise Mismatch(
            f"{info.name} is {info.dtype} {list(info.shape)} with scales {list(scales.shape)}; packed codes are U32"
        )
    q = Quantisation(
        bits=info.shape[-1] * 32 // cols,
        group=cols // scales.shape[-1],
        mode="mxfp4" if scales.dtype == "U8" else "affine",
        scale_dtype={v: k for k, v in SCALE_DTYPES.items()}.get(scales.dtype, scales.dtype),
    )
    reason = check_quantisation(q, cols)
    if reason or (q.mode == "affine") != (biases is not None):
        raise Mismatch(f"{info.name} has {q.bits} bits in groups of {q.group}: {reason or 'its biases are missing'}")
    _shape(info, (*lead, cols * q.bits // 32))
    for companion in (scales, biases):
        if companion is not None:
            _shape(companion, (*lead, cols // q.group))
            if companion.dtype != scales.dtype:
                raise Mismatch(f"{companion.name} is {companion.dtype} where its scales are {scales.dtype}")
    return Packed(q)


def _fp8(checkpoint: Checkpoint, info: TensorInfo, shape: tuple[int, ...]) -> FP8:
    scales = checkpoint.tensors[info.name + "_scale_inv"]
    if info.dtype != "F8_E4M3" or scales.dtype not in SCALES:
        raise Mismatch(
            f"{info.name} is {info.dtype}, its scales {scales.dtype}; F8_E4M3 and {', '.join(SCALES)} are read"
        )
    _shape(info, shape)
    if len(shape) < 2:
        raise Mismatch(f"{info.name} is F8_E4M3 {list(shape)}; block scales are read for matrices alone")
    _shape(scales, scale_shape(shape))
    return FP8()


def encoding_of(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> Encoding:
    """How the source tensor `name`, of logical shape `shape`, is encoded. Raises Mismatch."""
    info = checkpoint.tensors[name]
    if name.removesuffix(".weight") + ".scales" in checkpoint.tensors:
        return _packed(checkpoint, info, shape)
    if name + "_scale_inv" in checkpoint.tensors:
        return _fp8(checkpoint, info, shape)
    _shape(info, shape)
    if info.dtype not in PLAIN_DTYPES:
        raise Mismatch(f"{name} is {info.dtype} where one of {', '.join(PLAIN_DTYPES)} is needed")
    return Plain(info.dtype)


def read(checkpoint: Checkpoint, name: str, encoding: Encoding, cols: int, start: int, stop: int) -> list[Bytes]:
    """Rows [start, stop) of a source tensor, a byte array per part (plain: values; packed: codes, scales, biases)."""
    blocks = []
    for part in companions(name, encoding)[: 1 if isinstance(encoding, FP8) else None]:
        info = checkpoint.tensors[part]
        width = cols * ITEM_BYTES[info.dtype] if part == name and not isinstance(encoding, Packed) else None
        width = info.shape[-1] * ITEM_BYTES[info.dtype] if width is None else width
        blocks.append(checkpoint.read(info, start * width, (stop - start) * width).reshape(stop - start, width))
    if isinstance(encoding, FP8):
        return [decode(blocks[0], _block_scales(checkpoint, name, start, stop))]
    return blocks


def _block_scales(checkpoint: Checkpoint, name: str, start: int, stop: int) -> np.ndarray:
    info, rows = checkpoint.tensors[name + "_scale_inv"], checkpoint.tensors[name].shape[-2]
    per_matrix, width = info.shape[-2], info.shape[-1] * ITEM_BYTES[info.dtype]
    row = np.arange(start, stop)
    block = row // rows * per_matrix + row % rows // BLOCK
    count = int(block[-1] - block[0]) + 1
    raw = checkpoint.read(info, int(block[0]) * width, count * width).reshape(count, width)
    return SCALES[info.dtype](raw)[block - block[0]]
