"""The gated delta rule on the CPU, by the native extension (csrc/cpu/gated_delta.h), any number of tokens."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from .backend import Mode, register
from .gated_delta import GatedDelta
from .native import FLOATS, extension

MOST_TAPS = 8  # of a native convolution: GatedDelta::most_taps in csrc/cpu/gated_delta.h


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
    native: Any = extension()
    constants = (p.astype(mx.float32) for p in (conv_weight, a_log, dt_bias))
    return GatedDelta(*native.gated_delta(qkv, a, b, conv_state, *constants, state, key_heads))


def _supports(qkv: mx.array, a: mx.array, b: mx.array, conv_state: mx.array, conv_weight: mx.array, *rest: Any) -> bool:
    floats = all(p.dtype in FLOATS for p in (qkv, a, b, conv_state))
    return extension() is not None and floats and conv_weight.shape[1] <= MOST_TAPS


register("gated_delta", "native", _gated_delta, _supports)
