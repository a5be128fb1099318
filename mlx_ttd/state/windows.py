"""Ranges of a state's arrays on the host, a window at a time, so that no copy of a state is ever made."""

from __future__ import annotations

import math
from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from ..errors import StateError
from ..kernels import device_kind, to_device

# Saving and restoring hold at most three of these beside the state.
WINDOW_BYTES = 2 << 20
WORDS = {2: mx.uint16, 4: mx.uint32}
EXPONENTS = {mx.float32: 0x7F800000, mx.bfloat16: 0x7F80}
Window = tuple[int, int, int]


def windows(shape: tuple[int, ...], itemsize: int) -> Iterator[Window]:
    """(i, start, stop) of the ranges [i, start:stop] that make up an array in order, each of at most WINDOW_BYTES."""
    step = max(1, WINDOW_BYTES // (math.prod(shape[2:]) * itemsize))
    for i in range(shape[0]):
        for start in range(0, shape[1], step):
            yield i, start, min(start + step, shape[1])


def window_shape(shape: tuple[int, ...], window: Window) -> tuple[int, ...]:
    return window[2] - window[1], *shape[2:]


def read_window(array: mx.array, window: Window) -> np.ndarray:
    """The words of a range, those of the array itself where host and device share memory."""
    i, start, stop = window
    words = array.view(WORDS[array.itemsize])[i : i + 1]
    # A host that looks at device memory would move the whole array; a gather copies the range alone.
    part = mx.take(words, mx.arange(start, stop), axis=1) if device_kind() == "cuda" else words[:, start:stop]
    return np.ascontiguousarray(np.array(part, copy=False)[0])


def write_window(array: mx.array, window: Window, words: np.ndarray) -> None:
    """Put words into a range of an evaluated array that nobody else holds."""
    i, start, stop = window
    if device_kind() == "cuda":
        array[i, start:stop] = to_device(words).view(array.dtype)
        mx.eval(array)
    else:
        np.array(array.view(WORDS[array.itemsize]), copy=False)[i, start:stop] = words


def require_finite(words: np.ndarray, dtype: mx.Dtype, where: str) -> None:
    """StateError where words of a float dtype hold a NaN or an infinity."""
    exponent = EXPONENTS.get(dtype)
    if exponent is not None and ((words & exponent) == exponent).any():
        raise StateError(f"{where} holds numbers that are not finite; run the prompt again.")
