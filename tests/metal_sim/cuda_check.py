"""CUDA kernels compiled by NVRTC as MLX would, without a GPU: same options, same headers, same text around the kernel."""

from __future__ import annotations

import ctypes
import importlib.metadata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

from .compile import cache_folder, kept_as
from .errors import CompileError

ARCHITECTURE = "sm_90"
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
# What kernels see of MLX's own header, which only its CUDA wheels hold.
UTILS = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda/std/array>
#include <cuda/std/limits>
#include <cuda/std/tuple>
#define MAX_NDIM 10
#define WARP_SIZE 32
namespace mlx::core::cu {
using Shape = cuda::std::array<int32_t, MAX_NDIM>;
using Strides = cuda::std::array<int64_t, MAX_NDIM>;
}
"""
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


def why_not() -> str | None:
    """Why CUDA kernels cannot be compiled on this machine, or None where they can."""
    missing = [
        package for package, file in PACKAGES.items() if not any((root / file).exists() for root in nvidia_folders())
    ]
    return f"needs {' and '.join(missing)} 13.0" if missing else None


PACKAGES = {
    "nvidia-cuda-nvrtc": "lib/libnvrtc.so.13",
    "nvidia-cuda-runtime": "include/cuda_fp16.h",
    "nvidia-cuda-cccl": "include/cccl/cuda/std/array",
}


def nvidia_folders() -> list[Path]:
    found = []
    for package in PACKAGES:
        try:
            found.append(Path(str(importlib.metadata.distribution(package).locate_file("nvidia/cu13"))))
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _find(file: str) -> Path:
    return next(root / file for root in nvidia_folders() if (root / file).exists())


@cache
def _nvrtc() -> ctypes.CDLL:
    library = _find(PACKAGES["nvidia-cuda-nvrtc"])
    # NVRTC looks for this one by name alone, and so finds it loaded.
    ctypes.CDLL(str(next(library.parent.glob("libnvrtc-builtins.so.13.*"))))
    return ctypes.CDLL(str(library))


def compile_ptx(text: str, name: str, *options: str) -> str:
    """PTX of a CUDA text. CompileError with the compiler's log."""
    include = _find(PACKAGES["nvidia-cuda-runtime"]).parent
    arguments = [
        f"--gpu-architecture={ARCHITECTURE}",
        f"--include-path={_find(PACKAGES['nvidia-cuda-cccl']).parents[2]}",
        f"--include-path={include}",
        # Precompiled headers change the time (0.2 s for 1.6 s), not the code.
        "--pch",
        f"--pch-dir={cache_folder()}",
        *options,
    ]
    kept = kept_as(text, UTILS, str(_nvrtc()._name), *options).with_suffix(".ptx")
    if kept.exists():
        return kept.read_text()
    nvrtc, program = _nvrtc(), ctypes.c_void_p()
    header, header_name = ctypes.c_char_p(UTILS.encode()), ctypes.c_char_p(b"mlx/backend/cuda/device/utils.cuh")
    _checked(
        nvrtc.nvrtcCreateProgram(
            ctypes.byref(program),
            text.encode(),
            f"{name}.cu".encode(),
            1,
            ctypes.byref(header),
            ctypes.byref(header_name),
        )
    )
    try:
        flags = (ctypes.c_char_p * len(arguments))(*[a.encode() for a in arguments])
        if nvrtc.nvrtcCompileProgram(program, len(arguments), flags):
            raise CompileError(_read(program, "ProgramLog"))
        ptx = _read(program, "PTX")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    kept.write_text(ptx)
    return ptx


def _read(program: ctypes.c_void_p, what: str) -> str:
    size = ctypes.c_size_t()
    _checked(getattr(_nvrtc(), f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    text = ctypes.create_string_buffer(size.value)
    _checked(getattr(_nvrtc(), f"nvrtcGet{what}")(program, text))
    return text.value.decode()


def _checked(status: int) -> None:
    if status:
        raise CompileError(f"NVRTC failed with status {status}.")


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
