"""NVIDIA's run-time compiler from its wheel, with the options and headers that MLX gives it; no GPU is needed."""

from __future__ import annotations

import ctypes
import importlib.metadata
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from .compile import cache_folder, keep, kept_as
from .errors import CompileError

ARCHITECTURE = "sm_90"
PACKAGES = {
    "nvidia-cuda-nvrtc": "lib/libnvrtc.so.13",
    "nvidia-cuda-runtime": "include/cuda_fp16.h",
    "nvidia-cuda-cccl": "include/cccl/cuda/std/array",
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


def why_not() -> str | None:
    """Why CUDA kernels cannot be compiled on this machine, or None where they can."""
    if platform.system() != "Linux":
        return "needs Linux"
    found = [any((root / file).exists() for root in nvidia_folders()) for file in PACKAGES.values()]
    return None if all(found) else "needs the oracle extra"


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
    version = importlib.metadata.version("nvidia-cuda-nvrtc")
    kept = kept_as(text, UTILS, version, ARCHITECTURE, *options).with_suffix(".ptx")
    if kept.exists():
        return kept.read_text()
    with _compiled(text, name, options) as program:
        ptx = _read(program, "PTX").rstrip(b"\0").decode()
    keep(kept, ptx)
    return ptx


def registers(text: str, name: str) -> int:
    """Registers that each thread of a CUDA text's one kernel takes. CompileError with the compiler's log."""
    with _compiled(text, name, ()) as program:
        binary = _read(program, "CUBIN")
    # An attribute of the .nv.info section: format and kind (EIATTR_REGCOUNT), its size, the kernel's symbol, the count.
    start = binary.index(b"\x04\x2f\x08\x00")
    return int.from_bytes(binary[start + 8 : start + 12], "little")


@contextmanager
def _compiled(text: str, name: str, options: Sequence[str]) -> Iterator[ctypes.c_void_p]:
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
            raise CompileError(_read(program, "ProgramLog").rstrip(b"\0").decode())
        yield program
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _read(program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _checked(getattr(_nvrtc(), f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    found = ctypes.create_string_buffer(size.value)
    _checked(getattr(_nvrtc(), f"nvrtcGet{what}")(program, found))
    return found.raw


def _checked(status: int) -> None:
    if status:
        raise CompileError(f"NVRTC failed with status {status}.")
