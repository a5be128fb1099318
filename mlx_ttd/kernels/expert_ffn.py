"""The routed experts' feed-forward from packed records: silu(W_g x) * (W_u x), then W_d, weighted and summed.

Contract: products and sums of `combine` are rounded apart (no fused multiply-add) in ascending expert id, so that any
split of the experts over leases or machines gives the same bits.
"""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx
import numpy as np

from ..spec import Matrix, RecordLayout
from .backend import device_kind, register, run
from .work import as_dtype

DTYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32, "uint8": mx.uint8}


class Records(Protocol):
    """What a lease shows a kernel: `records` uint8 [slots, stride] and `slot_of` int32 [E], -1 where not leased.

    Kernels append what they return to `outputs`, so that the lease knows what still has to read its slots.
    """

    @property
    def records(self) -> mx.array: ...
    @property
    def slot_of(self) -> mx.array: ...
    @property
    def outputs(self) -> list[mx.array]: ...


def part_views(records: mx.array, matrix: Matrix) -> tuple[mx.array, mx.array, mx.array | None]:
    """Codes [slots, rows, words] uint32, scales and biases [slots, rows, groups] of a bank; they share its memory."""

    def view(offset: int, count: int, dtype: mx.Dtype) -> mx.array:
        typed = records.view(dtype)
        start = offset // dtype.size
        return typed[:, start : start + count].reshape(records.shape[0], matrix.rows, -1)

    scale_dtype = DTYPES[matrix.scale_dtype]
    groups = matrix.rows * matrix.groups
    codes = view(matrix.codes, matrix.rows * matrix.words, mx.uint32)
    scales = view(matrix.scales, groups, scale_dtype)
    return codes, scales, None if matrix.biases is None else view(matrix.biases, groups, scale_dtype)


def _project(x: mx.array, records: mx.array, matrix: Matrix, slots: mx.array) -> mx.array:
    """x [..., 1, cols] f32 times the matrix in each slot [...]: one row a product, so that no row sees another."""
    codes, scales, biases = part_views(records, matrix)
    if biases is not None:
        scales, biases = as_dtype(scales, mx.float32), as_dtype(biases, mx.float32)
    return mx.gather_qmm(
        x,
        codes,
        scales,
        biases,
        rhs_indices=slots,
        transpose=True,
        group_size=matrix.group,
        bits=matrix.bits,
        mode=matrix.mode,
        # MLX has no float32 gather_qmm for CUDA.
        stream=mx.cpu if device_kind() == "cuda" else None,
    )


def _feed_forward(x: mx.array, records: mx.array, slots: mx.array, layout: RecordLayout) -> mx.array:
    gate, up = mx.split(_project(x, records, layout.gate_up, slots), 2, axis=-1)
    return _project(gate * mx.sigmoid(gate) * up, records, layout.down, slots)


def _contributions(x: mx.array, lease: Records, rows: mx.array, layout: RecordLayout) -> mx.array:
    slots = lease.slot_of[rows]
    x = x.astype(mx.float32)[:, None, None, :]
    out = _feed_forward(x, lease.records, mx.maximum(slots, 0), layout)[:, :, 0, :]
    return mx.where((slots >= 0)[..., None], out, 0.0)


def _combine(contributions: mx.array, weights: mx.array) -> mx.array:
    total = contributions[:, 0] * weights[:, :1]
    for j in range(1, contributions.shape[1]):
        total = total + contributions[:, j] * weights[:, j : j + 1]
    return total


def _ffn(x: mx.array, lease: Records, rows: mx.array, weights: mx.array, layout: RecordLayout) -> mx.array:
    return combine(expert_contributions(x, lease, rows, layout), weights)


def _accumulate(
    acc: mx.array, x: mx.array, lease: Records, rows: mx.array, weights: mx.array, layout: RecordLayout
) -> mx.array:
    slot_of, chosen = np.array(lease.slot_of), np.array(rows)
    x = x.astype(mx.float32)
    for expert in np.intersect1d(np.unique(chosen), np.flatnonzero(slot_of >= 0)):
        tokens, choices = (mx.array(i) for i in np.nonzero(chosen == expert))
        slots = mx.full(tokens.shape, int(slot_of[expert]), mx.int32)
        out = _feed_forward(x[tokens][:, None, :], lease.records, slots, layout)[:, 0, :]
        acc = acc.at[tokens].add(weights[tokens, choices][:, None] * out)
    return acc


def expert_contributions(x: mx.array, lease: Records, rows: mx.array, layout: RecordLayout) -> mx.array:
    """Unweighted output of each chosen expert: f32 [T, k, H].

    x [T, H] f32, bf16 or f16; rows int32 [T, k], expert ids ascending along k. A choice whose expert is not in the
    lease gives zeros. gate x up stays f32.
    """
    lease.outputs.append(out := run("expert_contributions", x, lease, rows, layout))
    return out


def combine(contributions: mx.array, weights: mx.array) -> mx.array:
    """Sum of weights [T, k] f32 times contributions [T, k, H] f32 in order of k: f32 [T, H]."""
    return run("combine", contributions, weights)


def expert_ffn(x: mx.array, lease: Records, rows: mx.array, weights: mx.array, layout: RecordLayout) -> mx.array:
    """`combine(expert_contributions(...), weights)`, bit for bit, fused: f32 [T, H]. For decode and verify steps."""
    lease.outputs.append(out := run("expert_ffn", x, lease, rows, weights, layout))
    return out


def expert_ffn_accumulate(
    acc: mx.array, x: mx.array, lease: Records, rows: mx.array, weights: mx.array, layout: RecordLayout
) -> mx.array:
    """acc [T, H] f32 plus the weighted outputs of the leased experts, in ascending expert id. For prefill waves.

    Leases of successive calls must ascend in expert id. The rows of one expert are multiplied together.
    """
    lease.outputs.append(out := run("expert_ffn_accumulate", acc, x, lease, rows, weights, layout))
    return out


register("expert_contributions", "reference", _contributions)
register("combine", "reference", _combine)
register("expert_ffn", "reference", _ffn)
register("expert_ffn_accumulate", "reference", _accumulate)
