"""The rows of a checkpoint that make one tensor of the model."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from ..spec import Tensor
from .checkpoint import Checkpoint
from .encodings import Bytes, Encoding, companions, read
from .importers import Rows


@dataclass(frozen=True)
class Source:
    """The rows of source tensors that make one model tensor, in order, all of one encoding."""

    tensor: Tensor
    rows: tuple[Rows, ...]
    encoding: Encoding
    ends: tuple[int, ...]

    def names(self) -> set[str]:
        """The source tensors that are read."""
        return {part for rows in self.rows for part in companions(rows.name, self.encoding)}

    def read(self, checkpoint: Checkpoint, start: int, stop: int) -> list[Bytes]:
        """Rows [start, stop) of the model tensor, leading dimensions flattened: one byte array per part."""
        pieces = []
        index = bisect_right(self.ends, start)
        while start < stop:
            rows, end = self.rows[index], self.ends[index]
            first = rows.stop - (end - start)
            last = min(rows.stop, first + stop - start)
            pieces.append(read(checkpoint, rows.name, self.encoding, self.tensor.shape[-1], first, last))
            start, index = start + last - first, index + 1
        return pieces[0] if len(pieces) == 1 else [np.concatenate(parts) for parts in zip(*pieces, strict=True)]
