"""Random expert banks and weights with their values in float64, for tests of the native operations."""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from mlx_ttd.kernels import Weight
from mlx_ttd.kernels.expert_ffn import DTYPES
from mlx_ttd.spec import Matrix, RecordLayout


@dataclass
class Bank:
    """A lease without a provider."""

    records: mx.array
    slot_of: mx.array
    outputs: list[mx.array] = field(default_factory=list)


def random_records(layout: RecordLayout, slots: int, rng: np.random.Generator) -> mx.array:
    raw = rng.integers(0, 256, (slots, layout.stride), dtype=np.uint8)
    for m in (layout.gate_up, layout.down):
        for offset, low, high in ((m.scales, 0.5, 1.5), (m.biases, -8.0, 0.0)):
            values = rng.uniform(low, high, (slots, m.rows * m.groups)) / m.cols**0.5 / 2 ** (m.bits - 4)
            parts = np.array(mx.array(values.astype(np.float32)).astype(DTYPES[m.scale_dtype]).view(mx.uint8))
            raw[:, offset : offset + parts.shape[1]] = parts
    return mx.array(raw)


def random_bank(layout: RecordLayout, experts: int, rng: np.random.Generator, absent: float = 0.0) -> Bank:
    slot_of = rng.permutation(experts).astype(np.int32)
    slot_of[rng.random(experts) < absent] = -1
    return Bank(random_records(layout, experts, rng), mx.array(slot_of))


def random_choices(tokens: int, k: int, experts: int, rng: np.random.Generator) -> mx.array:
    return mx.array(np.sort(rng.random((tokens, experts)).argsort(axis=1)[:, :k], axis=1).astype(np.int32))


def codes_of(words: np.ndarray, bits: int) -> np.ndarray:
    """uint32 words [..., n], low bits first, to codes [..., n * 32 / bits]."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    return ((words[..., None] >> shifts) & (2**bits - 1)).reshape(*words.shape[:-1], -1)


def as_float64(a: mx.array) -> np.ndarray:
    return np.array(a.astype(mx.float32)).astype(np.float64)


def affine(words: np.ndarray, scales: np.ndarray, biases: np.ndarray, bits: int, group: int) -> np.ndarray:
    return codes_of(words, bits) * scales.repeat(group, axis=-1) + biases.repeat(group, axis=-1)


def expert_matrix(record: np.ndarray, m: Matrix) -> np.ndarray:
    """The float64 matrix in one record."""
    words = record[m.codes : m.codes + m.codes_bytes].view(np.uint32).reshape(m.rows, m.words)
    assert m.biases is not None
    scales, biases = (
        as_float64(mx.array(record[at : at + m.scales_bytes]).view(DTYPES[m.scale_dtype])).reshape(m.rows, m.groups)
        for at in (m.scales, m.biases)
    )
    return affine(words, scales, biases, m.bits, m.group)


def exact_contributions(x: mx.array, bank: Bank, rows: mx.array, layout: RecordLayout) -> np.ndarray:
    """float64 [T, k, H]."""
    records, slot_of, chosen, inputs = np.array(bank.records), np.array(bank.slot_of), np.array(rows), as_float64(x)
    out = np.zeros((*chosen.shape, layout.hidden))
    for expert in np.unique(chosen[slot_of[chosen] >= 0]):
        record = records[slot_of[expert]]
        tokens, choices = np.nonzero(chosen == expert)
        gate, up = np.split(inputs[tokens] @ expert_matrix(record, layout.gate_up).T, 2, axis=1)
        out[tokens, choices] = (gate / (1 + np.exp(-gate)) * up) @ expert_matrix(record, layout.down).T
    return out


def row_error(found: mx.array, exact: np.ndarray, least: float = 0.0) -> float:
    """Largest relative error of a row, in the Euclidean norm, against the root mean square of all rows' norms.

    `least` bounds that mean from below, for sums that may cancel to less than any order of adding them can resolve.
    """
    exact = np.asarray(exact, np.float64)
    norms = np.linalg.norm(np.array(found, np.float64) - exact, axis=-1)
    return float(norms.max() / max(np.sqrt((exact**2).mean() * exact.shape[-1]), least, 1e-150))


def random_weight(
    rows: int, cols: int, form: str, rng: np.random.Generator, group: int = 64
) -> tuple[Weight, np.ndarray]:
    """A weight as int4, int8 or a float dtype's name, and its float64 values."""
    values = mx.array(rng.standard_normal((rows, cols)).astype(np.float32))
    if form in ("int4", "int8"):
        bits = int(form[3:])
        codes, scales, biases = mx.quantize(values, group, bits)
        scales, biases = scales.astype(mx.bfloat16), biases.astype(mx.bfloat16)
        exact = affine(np.array(codes), as_float64(scales), as_float64(biases), bits, group)
        return Weight(codes, scales, biases, bits, group, "affine"), exact
    plain = values.astype(DTYPES[form])
    return Weight(plain), as_float64(plain)
