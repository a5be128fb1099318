"""Resident weights from a store, in the form the modules hold them."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from .. import kernels
from ..kernels import Mode, Weight
from ..observe import cancel_point
from ..store import Store, read_tensor


class Linear(nn.Module):
    """y = x W^T from W's stored form, plain or quantised."""

    def __init__(self, packed: Weight):
        super().__init__()
        self.packed = packed
        self.weight = packed.weight
        if packed.scales is not None:
            self.scales = packed.scales
        if packed.biases is not None:
            self.biases = packed.biases

    def __call__(self, x: mx.array, mode: Mode) -> mx.array:
        return kernels.linear(x, self.packed, mode)


class ResidentWeights:
    """Reads each resident tensor of `store` once, when a module asks for it. report: told the bytes read so far."""

    def __init__(self, store: Store, report: Callable[[int], None] | None = None):
        self.store, self.report = store, report
        self.bytes_read = 0

    def array(self, name: str) -> mx.array:
        cancel_point()
        info = self.store.resident[name]
        self.bytes_read += info.nbytes
        if self.report is not None:
            self.report(self.bytes_read)
        array = read_tensor(info)
        kernels.in_huge_pages(array)
        return array

    def packed(self, name: str) -> Weight:
        q = self.store.quantisation(name)
        if q is None:
            return Weight(self.array(name))
        biases = self.array(name + ".biases") if q.mode == "affine" else None
        return Weight(self.array(name), self.array(name + ".scales"), biases, q.bits, q.group, q.mode)

    def linear(self, name: str) -> Linear:
        return Linear(self.packed(name))

    def vector(self, name: str) -> mx.array:
        """A vector in f32."""
        return self.array(name).astype(mx.float32)

    def norm(self, name: str) -> mx.array:
        """A norm's weight as it multiplies, f32. The 1 + of a weight stored without it is added in f32."""
        w = self.vector(name)
        return w + 1.0 if self.store.norms == "w" else w
