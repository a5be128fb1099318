"""One launch: arguments copied into memory of its own, the kernel run over its grid, outputs copied back."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import mlx.core as mx
import numpy as np

from .compile import Program, runtime
from .errors import LaunchError
from .report import Findings, Region, place, read_findings

Order = Literal["forward", "reverse", "shuffle"]
ORDERS: tuple[Order, ...] = ("forward", "reverse", "shuffle")
SECONDS = 60.0


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("writable", ctypes.c_uint32),
        ("threadgroup", ctypes.c_uint32),
        ("initialised", ctypes.c_uint32),
    )


class _Request(ctypes.Structure):
    _fields_ = (
        ("entry", ctypes.c_void_p),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("grid", ctypes.c_uint32 * 3),
        ("threadgroup", ctypes.c_uint32 * 3),
        ("order", ctypes.c_uint32),
        ("seed", ctypes.c_uint32),
        ("diagnose", ctypes.c_uint32),
        ("seconds", ctypes.c_float),
        ("buffers", ctypes.POINTER(_Buffer)),
        ("buffer_count", ctypes.c_uint32),
        ("constants", ctypes.c_void_p),
        ("constant_bytes", ctypes.c_uint64),
        ("message", ctypes.c_char_p),
        ("message_bytes", ctypes.c_uint32),
        ("sites", ctypes.c_void_p * 2),
    )


@dataclass(frozen=True)
class Schedule:
    """Where a launch runs, in threads, and in which order its lanes, SIMD-groups and threadgroups do."""

    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    order: Order = "forward"
    seed: int = 0


@dataclass
class Argument:
    """Bytes that a kernel reads, or, where `written`, leaves behind."""

    name: str
    data: np.ndarray
    space: str = "device"
    written: bool = False
    initialised: bool = True


def bytes_of(x: mx.array) -> np.ndarray:
    if x.dtype == mx.bool_:
        return np.array(x).reshape(-1).view(np.uint8)
    return np.array(mx.contiguous(x).reshape(-1).view(mx.uint8), copy=False)


def array_of(data: np.ndarray, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    flat = mx.array(data)
    return (flat.astype(mx.bool_) if dtype == mx.bool_ else flat.view(dtype)).reshape(shape)


@contextmanager
def _allocated(arguments: Sequence[Argument]) -> Iterator[list[int]]:
    pointers = [runtime().msl_allocate(argument.data.nbytes) for argument in arguments]
    try:
        for pointer, argument in zip(pointers, arguments, strict=True):
            ctypes.memmove(pointer, argument.data.ctypes.data, argument.data.nbytes)
        yield pointers
    finally:
        for pointer, argument in zip(pointers, arguments, strict=True):
            runtime().msl_free(pointer, argument.data.nbytes)


@cache
def _load(library: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(library))


def launch(program: Program, arguments: Sequence[Argument], schedule: Schedule, diagnosed: bool) -> Findings:
    """Runs the program; the data of written arguments is replaced by what it wrote. LaunchError when it is stopped."""
    entry = ctypes.cast(_load(program.library).msl_entry, ctypes.c_void_p).value
    assert entry is not None
    base = entry - program.entry
    message = ctypes.create_string_buffer(512)
    with _allocated(arguments) as pointers:
        buffers = [
            _Buffer(a.name.encode(), pointer, a.data.nbytes, a.written, False, a.initialised)
            for a, pointer in zip(arguments, pointers, strict=True)
        ]
        buffers += [_Buffer(a.name.encode(), base + a.offset, a.bytes, True, True, False) for a in program.arrays]
        regions = [Region(a.name, a.space, a.data.nbytes) for a in arguments]
        regions += [Region(a.name, "threadgroup", a.bytes) for a in program.arrays]
        request = _Request(
            entry,
            (ctypes.c_void_p * len(pointers))(*pointers),
            schedule.grid,
            schedule.threadgroup,
            ORDERS.index(schedule.order),
            schedule.seed,
            diagnosed,
            SECONDS,
            (_Buffer * len(buffers))(*buffers),
            len(buffers),
            base,
            program.constants_end,
            ctypes.cast(message, ctypes.c_char_p),
            len(message),
        )
        failed = runtime().msl_launch(ctypes.byref(request))
        if failed and not diagnosed:
            raise LaunchError(_explain(message.value.decode(), request, program, base))
        for argument, pointer in zip(arguments, pointers, strict=True):
            if argument.written:
                argument.data = np.frombuffer(ctypes.string_at(pointer, argument.data.nbytes), np.uint8)
        findings = read_findings(program, base, regions) if diagnosed else Findings()
        if failed and message.value:
            findings.reports.append(_explain(message.value.decode(), request, program, base))
        return findings


def _explain(message: str, request: _Request, program: Program, base: int) -> str:
    places = [place(program, site - base) for site in request.sites if site]
    return f"{places[0]}: {message}" + (f" at {places[1]}" if len(places) > 1 else "") if places else message
