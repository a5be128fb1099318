"""Rows as bytes, from the encoding they are found in to the one the store keeps."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ..spec import Quantisation
from .encodings import Bytes, Encoding, Packed
from .fp8_block import bfloat16_bytes

NUMPY_VIEWS = {"F32": (np.float32, mx.float32), "BF16": (np.uint16, mx.bfloat16), "F16": (np.float16, mx.float16)}
SCALE_VIEWS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def stored_dtype(encoding: Encoding) -> str:
    """The safetensors dtype in which rows of this encoding are kept when they are kept plain."""
    return "BF16" if isinstance(encoding, Packed) else encoding.dtype


def _as_float32(block: Bytes, dtype: str) -> mx.array:
    view, kind = NUMPY_VIEWS[dtype]
    array = mx.array(block.view(view))
    return (array if kind == mx.float32 or array.dtype == kind else array.view(kind)).astype(mx.float32)


def _as_bytes(array: mx.array) -> Bytes:
    mx.eval(array)
    if array.dtype == mx.bfloat16:
        array = array.view(mx.uint16)
    return np.array(array, copy=True).view(np.uint8)


def quantise(values: mx.array, q: Quantisation) -> list[Bytes]:
    """Pack f32 rows by mx.quantize; affine scales and biases are rounded to bf16 last, as MLX does for bf16 rows."""
    if q.mode == "mxfp4":
        return [_as_bytes(a) for a in mx.quantize(values, q.group, q.bits, mode="mxfp4")]
    codes, scales, biases = mx.quantize(values, q.group, q.bits)
    return [_as_bytes(codes), _as_bytes(scales.astype(mx.bfloat16)), _as_bytes(biases.astype(mx.bfloat16))]


def dequantise(blocks: list[Bytes], q: Quantisation) -> mx.array:
    """Unpack rows to f32, each value computed in f32."""
    codes = mx.array(blocks[0].view(np.uint32))
    if q.mode == "mxfp4":
        return mx.dequantize(codes, mx.array(blocks[1]), None, q.group, q.bits, mode="mxfp4", dtype=mx.float32)
    scales, biases = (_as_float32(block, SCALE_VIEWS[q.scale_dtype]) for block in blocks[1:])
    return mx.dequantize(codes, scales, biases, q.group, q.bits)


def convert_rows(blocks: list[Bytes], encoding: Encoding, target: Quantisation | None) -> list[Bytes]:
    """The parts of some rows in the form the store keeps: the very bytes found when that form is already theirs."""
    found = encoding.quantisation if isinstance(encoding, Packed) else None
    if found == target:
        return blocks
    values = _as_float32(blocks[0], stored_dtype(encoding)) if found is None else dequantise(blocks, found)
    if target is None:
        return [bfloat16_bytes(np.array(values))]
    return quantise(values, target)
