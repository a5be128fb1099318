"""`cuda_kernel` with the signature of mx.fast.cuda_kernel: compiles, without a GPU, the text that MLX would make."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .nvrtc import compile_ptx

TYPES = {
    mx.bool_: "bool",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.float32: "float",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
}
PREAMBLE = """
#include "mlx/backend/cuda/device/utils.cuh"

#include <cooperative_groups.h>

#define inf cuda::std::numeric_limits<float>::infinity()

"""


@dataclass(frozen=True)
class CudaBuild:
    """A kernel compiled: its name, text and PTX, and the fused multiply-adds in the PTX and in the source.

    Those of the source are counted in PTX compiled without contraction, where only what is spelled fma is fused.
    """

    name: str
    text: str
    ptx: str
    fused: int
    fused_in_source: int


_logs: list[list[CudaBuild]] = []


@contextmanager
def builds() -> Iterator[list[CudaBuild]]:
    """The list grows by one CudaBuild for each call of a cuda_kernel inside."""
    log: list[CudaBuild] = []
    _logs.append(log)
    try:
        yield log
    finally:
        _logs.remove(log)


def cuda_text(
    name: str,
    header: str,
    body: str,
    inputs: Sequence[tuple[str, mx.array]],
    outputs: Sequence[tuple[str, mx.Dtype]],
    template: Sequence[tuple[str, Any]],
) -> str:
    """The text that MLX hands to NVRTC for a kernel."""
    parameters = []
    for argument, array in inputs:
        parameters.append(f"const {TYPES[array.dtype]}* {argument}")
        for told, kind in (("shape", "Shape"), ("strides", "Strides"), ("ndim", "int")):
            if array.ndim and f"{argument}_{told}" in body:
                parameters.append(f"const __grid_constant__ {kind} {argument}_{told}")
    parameters += [f"{TYPES[dtype]}* {argument}" for argument, dtype in outputs]
    constants = [
        f"  using {key} = {TYPES[value]};"
        if isinstance(value, mx.Dtype)
        else f"  constexpr {'bool' if isinstance(value, bool) else 'int'} {key} = {str(value).lower()};"
        for key, value in template
    ]
    return (
        f"{PREAMBLE}{header}namespace mlx::core::cu {{\n\nnamespace cg = cooperative_groups;\n\n"
        f"__global__ void {name}(\n    {f',{chr(10)}    '.join(parameters)}) {{\n"
        f"{chr(10).join(constants)}\n\n{body}\n}}\n\n}} // namespace mlx::core::cu\n"
    )


@dataclass(frozen=True)
class CudaKernel:
    """A kernel that is compiled when called, and gives zeros."""

    name: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    body: str
    header: str

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Sequence[tuple[str, Any]] = (),
        init_value: float | None = None,
        verbose: bool = False,
        stream: Any = None,
    ) -> list[mx.array]:
        name = f"custom_kernel_{self.name}"
        text = cuda_text(
            name,
            self.header,
            self.body,
            list(zip(self.input_names, inputs, strict=True)),
            list(zip(self.output_names, output_dtypes, strict=True)),
            template,
        )
        ptx, apart = compile_ptx(text, name), compile_ptx(text, name, "--fmad=false")
        build = CudaBuild(name, text, ptx, ptx.count("fma.rn"), apart.count("fma.rn"))
        for log in _logs:
            log.append(build)
        return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]


def cuda_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    shared_memory: int = 0,
) -> CudaKernel:
    """As mx.fast.cuda_kernel, but the kernel is only compiled, by NVRTC, when called; it gives zeros."""
    return CudaKernel(name, tuple(input_names), tuple(output_names), source, header)
