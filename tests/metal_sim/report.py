"""What a diagnosed launch found, told by source line."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from .compile import Program, call, runtime

LINE = 128


class _Report(ctypes.Structure):
    _fields_ = (("site", ctypes.c_void_p), ("text", ctypes.c_char * 240))


class _Site(ctypes.Structure):
    _fields_ = (
        ("site", ctypes.c_void_p),
        ("buffer", ctypes.c_uint32),
        ("store", ctypes.c_uint32),
        ("bytes", ctypes.c_uint32),
        ("worst", ctypes.c_uint32),
        ("instructions", ctypes.c_uint64),
        ("asked", ctypes.c_uint64),
        ("used", ctypes.c_uint64),
        ("lines", ctypes.c_uint64),
        ("touched", ctypes.POINTER(ctypes.c_uint64)),
    )


@dataclass(frozen=True)
class Region:
    """Memory that a kernel may touch: its name, address space and size in bytes."""

    name: str
    space: str
    bytes: int


@dataclass(frozen=True)
class Site:
    """How one source line reaches one buffer in device memory; a line is 128 bytes.

    Over its instructions (one a SIMD-group at a time): bytes a lane, bytes asked by all lanes, different bytes among
    them, lines touched, the most by one instruction. Over the launch: different bytes, and those the buffer has
    in the lines touched.
    """

    place: str
    buffer: str
    store: bool
    bytes: int
    instructions: int
    asked: int
    used: int
    lines: int
    worst: int
    distinct_bytes: int
    reachable: int

    @property
    def line_use(self) -> float:
        """The share of the lines that an instruction touches which it uses, on average."""
        return self.used / (LINE * self.lines)

    @property
    def coverage(self) -> float:
        """The share of the lines touched at all that the launch uses."""
        return self.distinct_bytes / self.reachable

    def __str__(self) -> str:
        return (
            f"{self.place:24} {'store' if self.store else 'load':5} {self.buffer:12} {self.bytes:2} B"
            f" {self.instructions:8} instructions {self.asked:10} bytes {self.lines:8} lines, worst {self.worst},"
            f" {self.line_use:.0%} of them used, {self.coverage:.0%} over the launch"
        )


@dataclass
class Findings:
    """Reports, one text each, and sites, in order of place, of a launch."""

    reports: list[str] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)


@cache
def _lines(library: Path, address: int) -> str:
    printed = call(["addr2line", "-i", "-e", str(library), f"{address:#x}"]).splitlines()
    lines = [line.partition(" ")[0].rpartition("/")[2] for line in printed]
    return " in ".join(dict.fromkeys(line for line in lines if line.startswith(("header", "body")))) or "?"


def place(program: Program, address: int) -> str:
    """The source line of the instruction before `address`, and the lines it was inlined into."""
    return _lines(program.library, address - 1)


def read_findings(program: Program, base: int, regions: Sequence[Region]) -> Findings:
    """What the launch that just ended left in the runtime, which numbers the regions in this order."""
    count = ctypes.c_uint64()
    first = runtime().msl_reports(ctypes.byref(count))
    reports = list((_Report * count.value).from_address(first)) if count.value else []
    texts = [f"{place(program, r.site - base)}: {r.text.decode()}" for r in reports]
    first = runtime().msl_sites(ctypes.byref(count))
    raws = list((_Site * count.value).from_address(first)) if count.value else []
    same: dict[tuple[str, int, bool, int], list[_Site]] = defaultdict(list)
    for raw in raws:
        if regions[raw.buffer].space == "device":
            same[place(program, raw.site - base), raw.buffer, bool(raw.store), raw.bytes].append(raw)
    sites = [
        _site(where, regions[index], store, width, parts)
        for (where, index, store, width), parts in sorted(same.items())
    ]
    return Findings(texts, sites)


def _site(where: str, buffer: Region, store: bool, width: int, parts: Sequence[_Site]) -> Site:
    shape = (-(-buffer.bytes // LINE), LINE // 64)
    touched = np.bitwise_or.reduce([np.ctypeslib.as_array(part.touched, shape) for part in parts])
    return Site(
        place=where,
        buffer=buffer.name,
        store=store,
        bytes=width,
        instructions=sum(part.instructions for part in parts),
        asked=sum(part.asked for part in parts),
        used=sum(part.used for part in parts),
        lines=sum(part.lines for part in parts),
        worst=max(part.worst for part in parts),
        distinct_bytes=int(np.unpackbits(touched.view(np.uint8)).sum()),
        reachable=int(np.minimum(buffer.bytes - LINE * np.flatnonzero(touched.any(axis=1)), LINE).sum()),
    )
