"""Where two traces part: the first layer, quantity, token and element, and by how many units in the last place."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..errors import OptionError
from .probe import MODEL
from .trace import QUANTITIES, Trace, tensor_name

EXACT = ("router.ids",)


@dataclass(frozen=True)
class Difference:
    """The first difference in the order of computation. ulps: None for router sets, which are compared as sets."""

    layer: int
    quantity: str
    token: int
    element: int
    left: float
    right: float
    ulps: int | None

    def __str__(self) -> str:
        where = "the model" if self.layer == MODEL else f"layer {self.layer}"
        size = "" if self.ulps is None else f", {self.ulps:,} ULPs apart"
        place = f"{where}, {self.quantity}, token {self.token}, element {self.element}"
        return f"{place}: {self.left!r} and {self.right!r}{size}"


def incomparable(left: Trace, right: Trace) -> str | None:
    """Why two traces cannot be compared, or None."""
    if left.tokens != right.tokens:
        return "the traces are of different tokens"
    if left.store != right.store:
        return "the traces are of different stores"
    if left.layers != right.layers:
        return f"one trace has {left.layers} layers, the other {right.layers}"
    return None


def ulps(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Representable f32 values between each pair, int64; the sign bit is unfolded so that -0 and 0 are the same."""

    def ordered(values: np.ndarray) -> np.ndarray:
        bits = np.ascontiguousarray(values, np.float32).view(np.int32).astype(np.int64)
        return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)

    return np.abs(ordered(left) - ordered(right))


def _first(left: np.ndarray, right: np.ndarray, quantity: str, atol: float) -> tuple[int, int, int | None] | None:
    if left.shape != right.shape:
        return 0, 0, None
    if quantity in EXACT:
        rows = np.flatnonzero((np.sort(left, axis=-1) != np.sort(right, axis=-1)).any(axis=-1))
        return None if not len(rows) else (int(rows[0]), int(np.flatnonzero(left[rows[0]] != right[rows[0]])[0]), None)
    apart = ~(np.abs(left.astype(np.float64) - right.astype(np.float64)) <= atol) if atol else ulps(left, right) > 0
    if not apart.any():
        return None
    token = int(np.flatnonzero(apart.reshape(len(left), -1).any(axis=1))[0])
    element = int(np.flatnonzero(apart[token])[0])
    return token, element, int(ulps(left[token], right[token])[element])


def first_difference(left: Trace, right: Trace, atol: float = 0.0) -> Difference | None:
    """The first difference over `atol` (0: any bit) in the order in which a model computes; None when there is none.

    Router sets are compared exactly, apart from numbers. A quantity that only one trace has is passed over.
    """
    if not 0 <= atol < math.inf:
        raise OptionError(f"atol is {atol!r}; it must be a number of at least 0 (0: only equal bits are equal).")
    order = [(MODEL, "embedding"), *((i, q) for i in range(left.layers) for q in QUANTITIES), (MODEL, "logits")]
    for layer, quantity in order:
        name = tensor_name(layer, quantity)
        if name not in left.arrays or name not in right.arrays:
            continue
        a, b = left.arrays[name], right.arrays[name]
        found = _first(a, b, quantity, atol)
        if found is not None:
            token, element, apart = found
            values = (a.reshape(len(a), -1)[token, element].item(), b.reshape(len(b), -1)[token, element].item())
            return Difference(layer, quantity, token, element, *values, apart)
    return None
