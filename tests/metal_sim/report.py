"""What a diagnosed launch found, told by source line."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from .compile import Program, call


@dataclass
class Findings:
    """Reports, one text each, of a launch."""

    reports: list[str] = field(default_factory=list)


@cache
def _lines(library: Path, address: int) -> str:
    printed = call(["addr2line", "-i", "-e", str(library), f"{address:#x}"]).splitlines()
    lines = [line.partition(" ")[0].rpartition("/")[2] for line in printed]
    return " in ".join(dict.fromkeys(line for line in lines if not line.startswith(("metal_stdlib", "entry"))))


def place(program: Program, address: int) -> str:
    """The source line of the instruction before `address`, and the lines it was inlined into."""
    return _lines(program.library, address - 1)


def read_findings(program: Program, base: int) -> Findings:
    return Findings()
