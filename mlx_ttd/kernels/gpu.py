"""Launching the kernel texts of csrc/kernels through MLX, the same way on Metal and on CUDA.

Everything that the two backends want different is settled here: the prelude, inputs that Metal would pass in another
address space (under 8 elements), grids that CUDA would round up, and names, by which MLX caches compiled code.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import KernelError
from .backend import device_kind
from .first_use import first_use
from .gpu_text import including_text, kernel_text, read_text, words
from .work import launched

SIMD_WIDTH = 32
THREADGROUP_BYTES = 32_768
FLOATS = (mx.float32, mx.bfloat16, mx.float16)
Template = tuple[tuple[str, int | bool | mx.Dtype], ...]


@dataclass(frozen=True)
class Text:
    """One kernel body, by name, with its arguments in order."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    headers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Geometry:
    """Threadgroups along the output rows, and the template values, of one launch."""

    threadgroups: int
    template: Template


def lanes_per_row(chunks: int) -> int:
    """Lanes that share a weight row of `chunks` 16-byte chunks: as many as divide it, at most a SIMD-group."""
    return math.gcd(chunks, SIMD_WIDTH)


def staged_bytes(cols: int) -> int:
    """Threadgroup memory that packed_rows.h takes, at most, for an activation of `cols` numbers."""
    return cols * 4 + cols // 2 + 128


@dataclass(eq=False)
class Variant:
    """A kernel with the template values that its body names: compilers warn of others, and MLX would compile once for
    each of theirs. used: whether it has run."""

    kernel: Callable[..., list[mx.array]]
    template: list[tuple[str, int | bool | mx.Dtype]]
    used: bool = False


@cache
def _compiled(text: Text, kind: str, dtypes: tuple[mx.Dtype, ...], template: Template) -> Variant:
    headers = (f"prelude_{kind}.h", *text.headers)
    header, body = whole = kernel_text(text.name, headers)
    # MLX keeps compiled code by name, so no two texts may share one.
    digest = hashlib.sha256("\0".join((*whole, *map(str, dtypes))).encode()).hexdigest()[:12]
    make: Any = mx.fast.metal_kernel
    if kind == "cuda":
        make = mx.fast.cuda_kernel
        header, body = including_text(text.name, headers, text.inputs)
    named = words(read_text(f"{text.name}.metal"))
    kernel = make(
        name=f"ttd_{text.name}_{digest}",
        input_names=list(text.inputs),
        output_names=list(text.outputs),
        header=header,
        source=body,
    )
    return Variant(kernel, [value for value in template if value[0] in named])


def _use_first(name: str, variant: Variant, inputs: Sequence[mx.array], outputs: Sequence[mx.array]) -> None:
    try:
        mx.eval(inputs)
    except ValueError:
        # Inside mx.compile nothing can be evaluated; the texts of such graphs have run outside of them before.
        return
    with first_use(name):
        mx.eval(outputs)
    variant.used = True


def _padded(x: mx.array) -> mx.array:
    return x if x.size >= 8 else mx.concatenate([x.reshape(-1), mx.zeros(8 - x.size, x.dtype)])


def launch(
    text: Text,
    inputs: Sequence[mx.array],
    template: Template,
    threadgroups: tuple[int, int, int],
    simdgroups: int,
    outputs: Sequence[tuple[tuple[int, ...], mx.Dtype]],
) -> list[mx.array]:
    """Lazy outputs (shape, dtype) of `text` run over `threadgroups` of `simdgroups` x 32 threads each."""
    variant = _compiled(text, device_kind(), tuple(x.dtype for x in inputs), template)
    threads = simdgroups * SIMD_WIDTH
    padded = [_padded(x) for x in inputs]
    found = variant.kernel(
        inputs=padded,
        template=variant.template,
        grid=(threadgroups[0] * threads, *threadgroups[1:]),
        threadgroup=(threads, 1, 1),
        output_shapes=[shape for shape, _ in outputs],
        output_dtypes=[dtype for _, dtype in outputs],
    )
    launched()
    if not variant.used:
        _use_first(text.name, variant, padded, found)
    return found


@cache
def constant(value: float) -> mx.array:
    """A number as a text takes it: f32 [8]."""
    return mx.array(np.full(8, value, np.float32))


def require_dtype(op: str, name: str, x: mx.array, *dtypes: mx.Dtype) -> None:
    """KernelError unless x has one of `dtypes`."""
    if x.dtype not in dtypes:
        wanted = ", ".join(str(d).removeprefix("mlx.core.") for d in dtypes)
        got = str(x.dtype).removeprefix("mlx.core.")
        raise KernelError(f"{op}: {name} is {got}, but the GPU kernel takes {wanted}; cast it first.")


def require_simd_width() -> None:
    """KernelError where there is a GPU whose SIMD-groups have not 32 threads, as every text assumes. Waits for it."""
    if device_kind() == "cpu":
        return
    width = launch(SIMD_WIDTH_TEXT, [mx.zeros(8)], (), (1, 1, 1), 1, [((1,), mx.uint32)])[0].item()
    if width != SIMD_WIDTH:
        raise KernelError(f"This GPU has SIMD-groups of {width} threads; the kernels need 32. Use the CPU device.")


SIMD_WIDTH_TEXT = Text("simd_width", ("x",), ("width",))
