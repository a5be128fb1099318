"""Packing numbers to MLX's affine codes."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from .backend import register, run

DTYPES = {np.dtype(np.float32): mx.float32, np.dtype(np.float16): mx.float16, np.dtype(np.uint16): mx.bfloat16}


def _quantize(
    values: np.ndarray, bits: int, group: int, codes: np.ndarray, scales: np.ndarray, biases: np.ndarray
) -> None:
    array, dtype = mx.array(values), DTYPES[values.dtype]
    array = array.view(dtype) if dtype == mx.bfloat16 else array
    words, *affine = mx.quantize(array.astype(mx.float32), group, bits)
    codes[...] = np.array(words)
    for part, found in zip((scales, biases), affine, strict=True):
        rounded = found.astype(DTYPES[part.dtype])
        part[...] = np.array(rounded.view(mx.uint16) if rounded.dtype == mx.bfloat16 else rounded)


def quantize(
    values: np.ndarray, bits: int, group: int, codes: np.ndarray, scales: np.ndarray, biases: np.ndarray
) -> None:
    """Pack values [rows, n] into codes uint32 [rows, n * bits / 32], scales and biases [rows, n / group].

    Values, scales and biases are numpy's float32, float16 or, as uint16, the bits of bfloat16. Every step is in
    float32 with the bits of mx.quantize, scales and biases rounded last. It keeps to the caller's thread on a CPU.
    """
    run("quantize", values, bits, group, codes, scales, biases)


register("quantize", "reference", _quantize)
