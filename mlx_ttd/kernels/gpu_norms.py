"""Norms and gates on a GPU, one launch each."""

from __future__ import annotations

import mlx.core as mx

from .backend import register
from .gpu import FLOATS, SIMD_WIDTH, Text, constant, launch, require_dtype

HEADERS = ("packed_rows.h", "scalar_maths.h", "row_sum.h")
RMS_NORM = Text("rms_norm", ("x", "w", "eps"), ("out",), (*HEADERS, "norm_row.h"))
ADD_RMS_NORM = Text("add_rms_norm", ("x", "y", "w", "eps"), ("total", "normed"), (*HEADERS, "norm_row.h"))
GATED_RMS_NORM = Text("gated_rms_norm", ("x", "z", "w", "eps"), ("out",), HEADERS)
SWIGLU = Text("swiglu", ("gate", "up"), ("out",), ("scalar_maths.h",))
SIGMOID_SCALED = Text("sigmoid_scaled", ("scale", "x"), ("out",), ("scalar_maths.h",))
SIMDGROUPS = 8
THREADS = SIMDGROUPS * SIMD_WIDTH


def _rms_norm(x: mx.array, w: mx.array, eps: float) -> mx.array:
    require_dtype("rms_norm", "x", x, *FLOATS)
    require_dtype("rms_norm", "w", w, mx.float32)
    width = x.shape[-1]
    template = (("T", x.dtype), ("WIDTH", width), ("SIMDS", SIMDGROUPS))
    groups = (x.size // width, 1, 1)
    return launch(RMS_NORM, [x, w, constant(eps)], template, groups, SIMDGROUPS, [(x.shape, x.dtype)])[0]


def _add_rms_norm(x: mx.array, y: mx.array, w: mx.array, eps: float) -> tuple[mx.array, mx.array]:
    require_dtype("add_rms_norm", "x", x, *FLOATS)
    require_dtype("add_rms_norm", "y", y, x.dtype)
    require_dtype("add_rms_norm", "w", w, mx.float32)
    width = x.shape[-1]
    template = (("T", x.dtype), ("WIDTH", width), ("SIMDS", SIMDGROUPS))
    inputs, groups = [x, y, w, constant(eps)], (x.size // width, 1, 1)
    total, normed = launch(ADD_RMS_NORM, inputs, template, groups, SIMDGROUPS, [(x.shape, x.dtype)] * 2)
    return total, normed


def _gated_rms_norm(x: mx.array, z: mx.array, w: mx.array, eps: float) -> mx.array:
    require_dtype("gated_rms_norm", "x", x, mx.float32)
    require_dtype("gated_rms_norm", "z", z, *FLOATS)
    require_dtype("gated_rms_norm", "w", w, mx.float32)
    template = (("T", z.dtype), ("WIDTH", z.shape[2]), ("SIMDS", SIMDGROUPS))
    groups = (-(-z.shape[0] * z.shape[1] // SIMDGROUPS), 1, 1)
    return launch(GATED_RMS_NORM, [x, z, w, constant(eps)], template, groups, SIMDGROUPS, [(z.shape, z.dtype)])[0]


def _swiglu(gate: mx.array, up: mx.array) -> mx.array:
    require_dtype("swiglu", "gate", gate, *FLOATS)
    require_dtype("swiglu", "up", up, gate.dtype)
    template = (("T", gate.dtype), ("THREADS", THREADS))
    groups = (-(-gate.size // THREADS), 1, 1)
    return launch(SWIGLU, [gate, up], template, groups, SIMDGROUPS, [(gate.shape, gate.dtype)])[0]


def _sigmoid_scaled(scale: mx.array, x: mx.array) -> mx.array:
    require_dtype("sigmoid_scaled", "x", x, *FLOATS)
    rows, width = x.shape
    template = (("WIDTH", width), ("THREADS", THREADS))
    groups = (-(-width // THREADS), rows, 1)
    return launch(SIGMOID_SCALED, [scale, x], template, groups, SIMDGROUPS, [(x.shape, mx.float32)])[0]


register("rms_norm", "gpu", _rms_norm, lambda x, w, eps: x.shape[-1] % 4 == 0)
register("add_rms_norm", "gpu", _add_rms_norm, lambda x, y, w, eps: x.shape[-1] % 4 == 0)
register("gated_rms_norm", "gpu", _gated_rms_norm, lambda x, z, w, eps: z.shape[2] % SIMD_WIDTH == 0)
register("swiglu", "gpu", _swiglu, lambda gate, up: gate.ndim == 2)
register("sigmoid_scaled", "gpu", _sigmoid_scaled)
