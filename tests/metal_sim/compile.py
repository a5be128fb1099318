"""Building kernels and the runtime with clang, each once: results are kept by the hash of all that went in."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from .errors import CompileError
from .source import KernelSource, for_clang

HERE = Path(__file__).parent
EXTENSIONS = (
    "-__opencl_c_pipes,-__opencl_c_device_enqueue,-__opencl_c_generic_address_space,"
    "+cl_khr_fp16,-cl_khr_fp64,-__opencl_c_fp64"
)
KERNEL = [
    *("-x", "cl", "-cl-std=clc++2021", "-cl-no-stdinc", "-Xclang", f"-cl-ext={EXTENSIONS}"),
    *("-Xclang", "-cl-single-precision-constant", "-ffp-contract=off", "-Xclang", "-ffloat16-excess-precision=none"),
    *("-Xclang", "-fbfloat16-excess-precision=none", "-fno-strict-aliasing", "-fno-math-errno", "-gdwarf-4"),
    # A call in the tail of a function would have its caller's address.
    "-fno-optimize-sibling-calls",
    *("-gline-tables-only", "-fno-vectorize", "-fno-slp-vectorize", "-fPIC", "-Wall", "-Werror"),
    *(
        "-Wno-unused-const-variable",
        "-Wno-pass-failed",
        "-Wno-unknown-pragmas",
        "-Wno-unused-function",
        "-Wno-pragma-clang-attribute",
    ),
]
FAST = ["-O2"]
# Each threadgroup array is followed by bytes that no other has, so that running past its end is seen.
ARRAY = re.compile(r"(\.comm\t_ZZ\w+,)(\d+),")
ARRAY_GUARD = 256
CHECKS = "shift,signed-integer-overflow,float-cast-overflow,integer-divide-by-zero,array-bounds"
DIAGNOSED = [
    *("-O1", "-fsanitize=thread", "-mllvm", "-tsan-instrument-func-entry-exit=0"),
    *("-mllvm", "-tsan-instrument-read-before-write", "-ftrivial-auto-var-init=pattern"),
    *(f"-fsanitize={CHECKS}", "-fsanitize-recover=all"),
]
# Without -O2 ziglang would link a sanitizer runtime of its own.
LINK = ["-shared", "-O2", "-fno-sanitize=all"]
RUNTIME = ["-x", "c++", "-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]


@dataclass(frozen=True)
class Compiler:
    """Commands that compile kernels and C++, and the text that tells their version."""

    kernels: tuple[str, ...]
    cplusplus: tuple[str, ...]
    version: str


@dataclass(frozen=True)
class ThreadgroupArray:
    """An array in threadgroup memory: its name, offset in the library and size in bytes."""

    name: str
    offset: int
    bytes: int


@dataclass(frozen=True)
class Program:
    """A kernel compiled: the library, the offsets of its entry and its threadgroup arrays, and its constants' end."""

    library: Path
    entry: int
    arrays: tuple[ThreadgroupArray, ...]
    constants_end: int


@cache
def find_compiler() -> Compiler | None:
    """TTD_CLANG (a command, or ziglang), else a clang of 19 or later on the path, else ziglang's, else None."""
    named = os.environ.get("TTD_CLANG")
    candidates = [named] if named else [f"clang-{n}" for n in range(19, 25)]
    for name in candidates:
        if shutil.which(name):
            return Compiler((name,), (name,), _version([name]))
    if find_spec("ziglang"):
        zig = (sys.executable, "-m", "ziglang")
        return Compiler((*zig, "clang"), (*zig, "c++"), _version([*zig, "clang"]))
    return None


def why_not() -> str | None:
    """Why kernels cannot be simulated on this machine, or None where they can."""
    if platform.system() != "Linux":
        return "needs Linux"
    if platform.machine() != "x86_64":
        return "needs x86-64"
    if find_compiler() is None or not (shutil.which("addr2line") and shutil.which("nm")):
        return "needs clang 19 or later, or ziglang, and binutils"
    return None


def _version(command: Sequence[str]) -> str:
    return subprocess.run([*command, "--version"], capture_output=True, text=True, check=True).stdout


def cache_folder() -> Path:
    root = os.environ.get("TTD_SIM_CACHE")
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(root) if root else Path(home) / "mlx_ttd" / "metal_sim"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def compiler() -> Compiler:
    found = find_compiler()
    if found is None:
        raise CompileError("There is no clang 19 or later, and no ziglang: set TTD_CLANG or install one.")
    return found


def kept_as(*parts: str) -> Path:
    """Where the cache keeps what comes of `parts`."""
    return cache_folder() / hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def keep(path: Path, text: str) -> None:
    """Writes a file so that no other process ever sees half of it."""
    unfinished = path.with_suffix(f"{path.suffix}.{os.getpid()}")
    unfinished.write_text(text)
    unfinished.replace(path)


def call(command: Sequence[str], text: str | None = None) -> str:
    """What `command` prints; CompileError with its complaints when it fails."""
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise CompileError(done.stderr or f"{command[0]} ended with {done.returncode}.")
    return done.stdout


def machine_flags() -> list[str]:
    flags = Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split()
    return ["-march=x86-64-v3"] if {"avx2", "bmi2", "f16c", "fma"} <= set(flags) else []


@cache
def runtime() -> ctypes.CDLL:
    sources = [HERE / "runtime.cpp", HERE / "diag.cpp"]
    texts = [path.read_text() for path in (*sources, HERE / "runtime.hpp")]
    library = kept_as(compiler().version, *texts, *RUNTIME).with_suffix(".so")
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
            built = Path(folder) / "runtime.so"
            call([*compiler().cplusplus, *RUNTIME, *map(str, sources), "-lstdc++", "-o", str(built)])
            built.replace(library)
    loaded = ctypes.CDLL(str(library))
    loaded.msl_allocate.restype = ctypes.c_void_p
    loaded.msl_allocate.argtypes = [ctypes.c_uint64]
    loaded.msl_free.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    loaded.msl_reports.restype = loaded.msl_sites.restype = ctypes.c_void_p
    return loaded


@cache
def llvm(source: KernelSource) -> str:
    """The kernel in LLVM's language, functions inlined, with the place of each instruction."""
    flags = [*KERNEL, "-O1", "-S", "-emit-llvm", "-I", str(HERE), "-", "-o", "-"]
    return call([*compiler().kernels, *flags], for_clang(source))


@cache
def build(source: KernelSource, diagnosed: bool) -> Program:
    """The kernel compiled, fast or with every memory access reported to the runtime."""
    text = for_clang(source)
    flags = [*KERNEL, *machine_flags(), *(DIAGNOSED if diagnosed else FAST)]
    shim = (HERE / "metal_stdlib").read_text()
    library = kept_as(compiler().version, text, shim, runtime()._name, *flags).with_suffix(".so")
    described = library.with_suffix(".json")
    if not described.exists():
        with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
            assembly, linked = Path(folder) / "kernel.s", Path(folder) / "kernel.so"
            written = call([*compiler().kernels, *flags, "-I", str(HERE), "-S", "-", "-o", "-"], text)
            assembly.write_text(ARRAY.sub(lambda m: f"{m[1]}{int(m[2]) + ARRAY_GUARD},", written))
            call([*compiler().cplusplus, *LINK, str(assembly), runtime()._name, "-lm", "-o", str(linked)])
            description = _describe(linked, source.name)
            linked.replace(library)
            keep(described, json.dumps(description))
    entry, arrays, end = json.loads(described.read_text())
    return Program(library, entry, tuple(ThreadgroupArray(*array) for array in arrays), end)


def _describe(library: Path, kernel: str) -> tuple[int, list[tuple[str, int, int]], int]:
    entry, arrays, end = 0, [], 0
    for line in call(["nm", "-SC", "--defined-only", str(library)]).splitlines():
        value, size, kind, name = [*line.split(maxsplit=3), ""][:4]
        if name == "msl_entry":
            entry = int(value, 16)
        elif kind == "b" and name.startswith(f"{kernel}::"):
            arrays.append((name.rpartition("::")[2], int(value, 16), int(size, 16) - ARRAY_GUARD))
        elif name:
            end = max(end, int(value, 16) + int(size, 16))
    return entry, arrays, min((offset for _, offset, _ in arrays), default=end)
