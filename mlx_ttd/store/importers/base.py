"""What an importer is: per role, which rows of which source tensors make the model's tensor. Byte moves only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ...spec import ModelSpec, Tensor
from ..checkpoint import Checkpoint

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows [start, stop) of source tensor `name` [`shape`], seen as rows of the model tensor's last dimension."""

    name: str
    shape: Shape
    start: int
    stop: int


Move = tuple[Rows, ...]
Alternatives = Callable[[ModelSpec, Tensor], list[Move]]


def row_count(shape: Shape) -> int:
    """Rows of a tensor when all its leading dimensions are flattened; a vector is one row."""
    count = 1
    for n in shape[:-1]:
        count *= n
    return count


def take(name: str, shape: Shape) -> Move:
    """The whole source tensor."""
    return (Rows(name, shape, 0, row_count(shape)),)


def reshape(name: str, source: Shape, target: Shape) -> Move:
    """The whole source tensor of another shape with the same bytes in the same order."""
    return (Rows(name, source, 0, row_count(target)),)


def cut(name: str, shape: Shape, start: int, stop: int) -> Move:
    """A slice of the source tensor's flattened rows."""
    return (Rows(name, shape, start, stop),)


def concat(*moves: Move) -> Move:
    """The rows of several moves, one after the other; of slices of one tensor, a permutation."""
    return tuple(rows for move in moves for rows in move)


@dataclass(frozen=True)
class Importer:
    """One kind of checkpoint.

    `recognises` looks at names and config. `paths` maps a role to the source name below the layer's prefix. `moves`
    maps a role to other ways of finding it, tried first and in order; the first whose source tensors exist and fit
    wins.
    """

    name: str
    recognises: Callable[[Checkpoint], bool]
    paths: Mapping[str, str]
    moves: Mapping[str, Alternatives]

    def alternatives(self, spec: ModelSpec, tensor: Tensor) -> list[Move]:
        """The moves that can make `tensor`, with source names relative to the layer (or trunk) prefix."""
        found = [take(self.paths[tensor.role], tensor.shape)] if tensor.role in self.paths else []
        return self.moves[tensor.role](spec, tensor) + found if tensor.role in self.moves else found
