"""A step of a gated DeltaNet mixer on the CPU in one call (csrc/cpu/delta_mixer.h)."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from .backend import Mode, register
from .delta_mixer import DeltaMixer
from .gated_delta import GatedDelta
from .native import FLOATS, extension
from .native_gated_delta import MOST_TAPS
from .native_linear import fits


def _delta_mixer(x: mx.array, w: DeltaMixer, conv_state: mx.array, state: mx.array, mode: Mode) -> GatedDelta:
    native: Any = extension()
    matrices = (m.native for m in (w.qkv, w.z, w.a, w.b, w.out))
    vectors = (v.astype(mx.float32) for v in (w.conv, w.a_log, w.dt_bias))
    norm = w.norm.astype(mx.float32)
    return GatedDelta(*native.delta_mixer(x, *matrices, conv_state, *vectors, state, norm, w.key_heads, w.eps))


def _supports(x: mx.array, w: DeltaMixer, conv_state: mx.array, state: mx.array, mode: Mode) -> bool:
    matrices = all(fits(x, m) for m in (w.qkv, w.z, w.a, w.b, w.out))
    return mode != "prefill" and matrices and conv_state.dtype in FLOATS and w.conv.shape[1] <= MOST_TAPS


register("delta_mixer", "native", _delta_mixer, _supports)
