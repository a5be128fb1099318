"""Keys and values as they are kept: plain numbers, or 8-bit codes, which take half of bf16's bytes."""

from __future__ import annotations

import mlx.core as mx

# Plain numbers [heads, positions, head_dim], or what mx.quantize makes of bf16 rows at 8 bits: codes uint32
# [heads, positions, head_dim / 4], scales and biases bf16 [heads, positions, head_dim / group].
KeptRows = mx.array | tuple[mx.array, mx.array, mx.array]


def rows_parts(rows: KeptRows) -> list[mx.array]:
    """The one array of plain numbers, or the three of codes."""
    return list(rows) if isinstance(rows, tuple) else [rows]


def kept_alike(keys: KeptRows, values: KeptRows) -> bool:
    """Whether both are of one form: dtype and shape of every part, and so the group of codes."""
    kept, same = ([(part.dtype, part.shape) for part in rows_parts(rows)] for rows in (keys, values))
    return kept == same


def quantise_rows(rows: mx.array, group: int) -> KeptRows:
    """Rows [..., head_dim] as codes, each group on 256 steps between its lowest and its highest number.

    A number v of a group whose ends lie d apart comes back within d / 120 + |v| / 256 + 1e-7: a step at the end that
    bias is not, where it may be cut off, one that the scale's rounding to bf16 adds up to, and v's own rounding.
    """
    codes, scales, biases = mx.quantize(rows.astype(mx.bfloat16), group, 8)
    return codes, scales, biases


def plain(rows: KeptRows, stop: int) -> mx.array:
    """The first `stop` positions as numbers; those of codes, code * scale + bias, in f32."""
    if not isinstance(rows, tuple):
        return rows[:, :stop]
    codes, scales, biases = (a[:, :stop] for a in rows)
    group = codes.shape[2] * 4 // scales.shape[2]
    return mx.dequantize(codes, scales.astype(mx.float32), biases.astype(mx.float32), group, 8)
