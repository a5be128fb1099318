"""Block FP8: e4m3 codes with one scale per 128 x 128 block, decoded to bf16."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

BLOCK = 128


def _e4m3_values() -> np.ndarray:
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    magnitude[code & 127 == 127] = np.nan
    return np.where(code < 128, magnitude, -magnitude).astype(np.float32)


VALUES = _e4m3_values()
SCALES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "F32": lambda raw: raw.view(np.float32),
    "BF16": lambda raw: (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32),
    "F8_E8M0": lambda raw: np.exp2(raw.astype(np.float32) - 127),
}


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scales of a weight [..., rows, cols]."""
    *lead, rows, cols = shape
    return (*lead, -(-rows // BLOCK), -(-cols // BLOCK))


def bfloat16_bytes(values: np.ndarray) -> np.ndarray:
    """f32 [n, cols] rounded to nearest even as bf16: uint8 [n, 2 * cols]."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16).view(np.uint8)


def decode(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Codes uint8 [n, cols] times scales f32 [n, ceil(cols / 128)], rounded once to bf16: uint8 [n, 2 * cols]."""
    values = VALUES[codes]
    values *= np.repeat(scales, BLOCK, axis=1)[:, : values.shape[1]]
    return bfloat16_bytes(values)
