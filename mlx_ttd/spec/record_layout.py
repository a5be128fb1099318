"""The one place that knows where the parts of an expert record lie, for Python, C++ and GPU texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

ALIGNMENT = 64
STRIDE_UNIT = 16_384

Format = Literal["affine", "mxfp4"]
SCALE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "uint8": 1}


def align(offset: int, unit: int) -> int:
    """The smallest multiple of `unit` that is at least `offset`."""
    return -(-offset // unit) * unit


@dataclass(frozen=True)
class Quantisation:
    """How a matrix is packed: MLX affine (w = q * scale + bias) or mxfp4 (e2m1 codes, e8m0 scales, no biases)."""

    bits: int
    group: int
    mode: Format = "affine"
    scale_dtype: str = "bfloat16"

    def row_bytes(self, cols: int) -> int:
        return cols * self.bits // 8


@dataclass(frozen=True)
class Matrix:
    """One packed matrix [rows, cols] inside a record; offsets are bytes from the start of the record."""

    rows: int
    cols: int
    bits: int
    group: int
    mode: Format
    scale_dtype: str
    codes: int
    scales: int
    biases: int | None

    @property
    def words(self) -> int:
        """uint32 words in a row of codes."""
        return self.cols * self.bits // 32

    @property
    def groups(self) -> int:
        """Quantisation groups in a row."""
        return self.cols // self.group

    @property
    def codes_bytes(self) -> int:
        return self.rows * self.words * 4

    @property
    def scales_bytes(self) -> int:
        return self.rows * self.groups * SCALE_BYTES[self.scale_dtype]


@dataclass(frozen=True)
class RecordLayout:
    """gate_up [2I, H] (gate rows, then up rows) and down [H, I] in one record of `stride` bytes."""

    gate_up: Matrix
    down: Matrix
    stride: int

    @property
    def hidden(self) -> int:
        return self.gate_up.cols

    @property
    def inter(self) -> int:
        return self.down.cols

    def to_json(self) -> dict[str, Any]:
        return {"gate_up": vars(self.gate_up), "down": vars(self.down), "stride": self.stride}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RecordLayout:
        return cls(Matrix(**data["gate_up"]), Matrix(**data["down"]), data["stride"])


def record_layout(hidden: int, inter: int, gate_up: Quantisation, down: Quantisation) -> RecordLayout:
    """Lay out gate_up codes | scales | biases | down codes | scales | biases, each part 64-byte aligned."""
    offset = 0
    matrices = []
    for rows, cols, q in ((2 * inter, hidden, gate_up), (hidden, inter, down)):
        codes = offset
        scales = align(codes + rows * q.row_bytes(cols), ALIGNMENT)
        scale_bytes = rows * (cols // q.group) * SCALE_BYTES[q.scale_dtype]
        end = scales + scale_bytes
        biases = None
        if q.mode == "affine":
            biases = align(end, ALIGNMENT)
            end = biases + scale_bytes
        offset = align(end, ALIGNMENT)
        matrices.append(Matrix(rows, cols, q.bits, q.group, q.mode, q.scale_dtype, codes, scales, biases))
    return RecordLayout(matrices[0], matrices[1], align(offset, STRIDE_UNIT))
