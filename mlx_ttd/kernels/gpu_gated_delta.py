"""The gated delta rule on a GPU: one launch for any number of tokens, the state in registers."""

from __future__ import annotations

import mlx.core as mx

from .backend import Mode, register
from .gated_delta import GatedDelta
from .gpu import FLOATS, SIMD_WIDTH, Text, launch, require_dtype

TEXT = Text(
    "gated_delta",
    ("qkv", "a", "b", "conv_state", "conv_weight", "a_log", "dt_bias", "state"),
    ("out", "new_conv_state", "new_state"),
    ("packed_rows.h", "scalar_maths.h"),
)
SIMDGROUPS = 4
ROWS = 4


def _gated_delta(
    qkv: mx.array,
    a: mx.array,
    b: mx.array,
    conv_state: mx.array,
    conv_weight: mx.array,
    a_log: mx.array,
    dt_bias: mx.array,
    state: mx.array,
    key_heads: int,
    mode: Mode,
) -> GatedDelta:
    require_dtype("gated_delta", "qkv", qkv, *FLOATS)
    require_dtype("gated_delta", "state", state, mx.float32)
    value_heads, value_dim, key_dim = state.shape
    template = (
        ("C", conv_state.dtype),
        ("KEY_HEADS", key_heads),
        ("VALUE_HEADS", value_heads),
        ("KEY_DIM", key_dim),
        ("VALUE_DIM", value_dim),
        ("TAPS", conv_weight.shape[1]),
        ("ROWS", ROWS),
        ("SIMDS", SIMDGROUPS),
    )
    outputs = launch(
        TEXT,
        [qkv, a, b, conv_state, conv_weight, a_log, dt_bias, state],
        template,
        (value_dim // (SIMDGROUPS * ROWS), value_heads, 1),
        SIMDGROUPS,
        [
            ((qkv.shape[0], value_heads, value_dim), mx.float32),
            (conv_state.shape, conv_state.dtype),
            (state.shape, mx.float32),
        ],
    )
    return GatedDelta(*outputs)


def _supports(qkv: mx.array, *rest: object) -> bool:
    conv_weight, state = rest[3], rest[6]
    assert isinstance(conv_weight, mx.array)
    assert isinstance(state, mx.array)
    _, value_dim, key_dim = state.shape
    return conv_weight.shape[1] >= 2 and key_dim % SIMD_WIDTH == 0 and value_dim % (SIMDGROUPS * ROWS) == 0


register("gated_delta", "gpu", _gated_delta, _supports)
