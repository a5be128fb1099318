"""Rows as bytes, from the encoding they are found in to the one the store keeps."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ..kernels import quantize
from ..spec import SCALE_BYTES, Quantisation
from .encodings import Bytes, Encoding, Packed
from .fp8_block import bfloat16_bytes

NUMPY_VIEWS = {"F32": (np.float32, mx.float32), "BF16": (np.uint16, mx.bfloat16), "F16": (np.float16, mx.float16)}
SCALE_VIEWS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def stored_dtype(encoding: Encoding) -> str:
    """The safetensors dtype in which rows of this encoding are kept when they are kept plain."""
    return "BF16" if isinstance(encoding, Packed) else encoding.dtype


def _array(block: Bytes, dtype: str) -> mx.array:
    view, kind = NUMPY_VIEWS[dtype]
    array = mx.array(block.view(view))
    return (array if array.dtype == kind else array.view(kind)).astype(mx.float32)


def numbers(block: Bytes, dtype: str) -> np.ndarray:
    """The values of plain bytes as f32."""
    return np.array(_array(block, dtype))


def dequantise(blocks: list[Bytes], q: Quantisation) -> mx.array:
    """Unpack rows to f32, each value computed in f32."""
    codes = mx.array(blocks[0].view(np.uint32))
    if q.mode == "mxfp4":
        return mx.dequantize(codes, mx.array(blocks[1]), None, q.group, q.bits, mode="mxfp4", dtype=mx.float32)
    scales, biases = (_array(block, SCALE_VIEWS[q.scale_dtype]) for block in blocks[1:])
    return mx.dequantize(codes, scales, biases, q.group, q.bits)


def empty_parts(rows: int, cols: int, q: Quantisation) -> list[Bytes]:
    """Room for `rows` packed rows: codes, scales in their dtype and, affine only, biases."""
    scales = cols // q.group * SCALE_BYTES[q.scale_dtype]
    widths = (q.row_bytes(cols), scales) if q.mode == "mxfp4" else (q.row_bytes(cols), scales, scales)
    return [np.empty((rows, width), np.uint8) for width in widths]


def pack_into(blocks: list[Bytes], encoding: Encoding, target: Quantisation, parts: list[Bytes]) -> None:
    """Put rows into `parts`: the very bytes found where `target` is how they are packed, else packed by it.

    Affine scales and biases are rounded to bf16 last, as MLX does for bf16 rows.
    """
    found = encoding.quantisation if isinstance(encoding, Packed) else None
    if found == target:
        for part, block in zip(parts, blocks, strict=True):
            part[...] = block
        return
    dtype = stored_dtype(encoding)
    if target.mode == "mxfp4":
        values = _array(blocks[0], dtype) if found is None else dequantise(blocks, found)
        for part, packed in zip(parts, mx.quantize(values, target.group, target.bits, mode="mxfp4"), strict=True):
            part[...] = np.array(packed).view(np.uint8)
        return
    numbers = blocks[0].view(NUMPY_VIEWS[dtype][0]) if found is None else np.array(dequantise(blocks, found))
    codes, scales, biases = parts
    quantize(numbers, target.bits, target.group, codes.view(np.uint32), scales.view(np.uint16), biases.view(np.uint16))


def plain_rows(blocks: list[Bytes], encoding: Encoding) -> Bytes:
    """Rows kept plain: the very bytes found, or bf16 where they are found packed."""
    if isinstance(encoding, Packed):
        return bfloat16_bytes(np.array(dequantise(blocks, encoding.quantisation)))
    return blocks[0]
