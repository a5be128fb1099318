"""The bytes of a planned file, piece by piece: ranges read ahead, packed by several workers, handed over in order."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor

import numpy as np

from ..spec import Matrix, RecordLayout
from .checkpoint import Checkpoint
from .encodings import Bytes, Plain
from .importers.base import row_count
from .pipeline import ahead, mapped
from .plan import PlannedFile, PlannedTensor
from .quantise import empty_parts, pack_into, plain_rows

RANGE_BYTES = 16 << 20

Piece = tuple[str | int, int, memoryview]  # tensor name or expert, position in the tensor or the records, bytes


def _spans(count: int, unit_bytes: int) -> Iterator[tuple[int, int]]:
    step = max(1, RANGE_BYTES // unit_bytes)
    return ((start, min(start + step, count)) for start in range(0, count, step))


def _value_bytes(planned: PlannedTensor) -> int:
    """What a value takes at most on its way: codes and FP8 pass through float32."""
    encoding = planned.source.encoding
    return 2 if isinstance(encoding, Plain) and encoding.dtype != "F32" else 4


def _dense(checkpoint: Checkpoint, file: PlannedFile, workers: Executor) -> Iterator[list[Piece]]:
    def read() -> Iterator[tuple[PlannedTensor, int, list[Bytes]]]:
        for planned in file.tensors:
            shape = planned.source.tensor.shape
            for start, stop in _spans(row_count(shape), shape[-1] * _value_bytes(planned)):
                yield planned, start, planned.source.read(checkpoint, start, stop)

    def pack(found: tuple[PlannedTensor, int, list[Bytes]]) -> list[Piece]:
        planned, start, blocks = found
        tensor, encoding, target = planned.source.tensor, planned.source.encoding, planned.target
        if target is None:
            parts = [plain_rows(blocks, encoding)]
        else:
            parts = empty_parts(len(blocks[0]), tensor.shape[-1], target)
            pack_into(blocks, encoding, target, parts)
        names = (tensor.name, tensor.name + ".scales", tensor.name + ".biases")
        named = zip(names, parts, strict=False)
        return [(name, start * part.shape[1], part.data.cast("B")) for name, part in named]

    return mapped(pack, ahead(read(), checkpoint.stop), workers)


def _places(matrix: Matrix) -> list[tuple[int, int]]:
    """Start and size of a matrix' codes, scales and, affine only, biases in a record."""
    sizes = (
        (matrix.codes, matrix.codes_bytes),
        (matrix.scales, matrix.scales_bytes),
        (matrix.biases, matrix.scales_bytes),
    )
    return [(start, size) for start, size in sizes if start is not None]


def _parts(record: np.ndarray, matrix: Matrix) -> list[Bytes]:
    return [record[start : start + size].reshape(matrix.rows, -1) for start, size in _places(matrix)]


def _clear_gaps(records: np.ndarray, layout: RecordLayout) -> None:
    end = 0
    for matrix in (layout.gate_up, layout.down):
        for start, size in _places(matrix):
            records[:, end:start] = 0
            end = start + size
    records[:, end:] = 0


def _experts(checkpoint: Checkpoint, file: PlannedFile, workers: Executor) -> Iterator[list[Piece]]:
    layout, experts = file.layout, file.tensors[0].source.tensor.shape[0]
    assert layout is not None

    def read() -> Iterator[tuple[int, int, list[list[Bytes]]]]:
        rows = [(t.source, t.source.tensor.shape[1]) for t in file.tensors]
        for first, last in _spans(experts, 3 * layout.hidden * layout.inter * _value_bytes(file.tensors[0])):
            yield first, last, [source.read(checkpoint, first * n, last * n) for source, n in rows]

    def pack(found: tuple[int, int, list[list[Bytes]]]) -> list[Piece]:
        first, last, blocks = found
        size = (last - first) * layout.stride
        records = checkpoint.rooms.take(size).reshape(-1, layout.stride)
        _clear_gaps(records, layout)
        for matrix, planned, found_blocks in zip((layout.gate_up, layout.down), file.tensors, blocks, strict=True):
            assert planned.target is not None
            for i, record in enumerate(records):
                rows = [block[i * matrix.rows : (i + 1) * matrix.rows] for block in found_blocks]
                pack_into(rows, planned.source.encoding, planned.target, _parts(record, matrix))
        return [(first + i, (first + i) * layout.stride, record.data) for i, record in enumerate(records)]

    return mapped(pack, ahead(read(), checkpoint.stop), workers)


def pieces(checkpoint: Checkpoint, file: PlannedFile, workers: Executor) -> Iterator[Piece]:
    """Every byte after the header, once, in ascending position within each tensor or record."""
    for batch in (_dense if file.layout is None else _experts)(checkpoint, file, workers):
        yield from batch
