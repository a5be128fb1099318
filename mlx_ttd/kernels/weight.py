"""A dense weight matrix in the form it is multiplied from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import mlx.core as mx

from .native import extension


@dataclass(frozen=True)
class Weight:
    """A matrix [out, in].

    mode "plain": `weight` is f32, bf16 or f16 [out, in]. mode "affine" or "mxfp4": `weight` is uint32 codes
    [out, in * bits / 32] with `scales` (and, affine only, `biases`) [out, in / group], as mx.quantize packs them.
    """

    weight: mx.array
    scales: mx.array | None = None
    biases: mx.array | None = None
    bits: int = 16
    group: int = 0
    mode: Literal["plain", "affine", "mxfp4"] = "plain"

    @property
    def rows(self) -> int:
        return self.weight.shape[0]

    @property
    def arrays(self) -> list[mx.array]:
        return [a for a in (self.weight, self.scales, self.biases) if a is not None]

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays)

    @cached_property
    def native(self) -> Any:
        """The same for the native extension, which has to be there; codes of 4 or 8 bits or plain numbers."""
        native: Any = extension()
        return native.Weight(self.weight, self.scales, self.biases, self.bits, self.group)

    def window(self, start: int, stop: int) -> Weight:
        """The rows [start, stop), sharing memory."""
        return self._cut(slice(start, stop))

    def take(self, rows: mx.array) -> Weight:
        """The rows at these indices, int [n]."""
        return self._cut(rows)

    def _cut(self, rows: slice | mx.array) -> Weight:
        return replace(
            self,
            weight=self.weight[rows],
            scales=None if self.scales is None else self.scales[rows],
            biases=None if self.biases is None else self.biases[rows],
        )

    def numbers(self, dtype: mx.Dtype) -> mx.array:
        """The matrix in `dtype`, unpacked in float32."""
        if self.scales is None:
            return self.weight.astype(dtype)
        scales, biases = self.scales, self.biases
        if biases is not None:
            scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        return mx.dequantize(self.weight, scales, biases, self.group, self.bits, self.mode).astype(dtype)
