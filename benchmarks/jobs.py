"""What a full run consists of: for each benchmark the commands of a round, their minutes, and the files they need."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass

SHAPE = "qwen3.6-35b-a3b"


@dataclass(frozen=True)
class File:
    """A store or the like that a command writes to `{file}`; disk: bytes that it and its users need."""

    name: str
    module: str
    arguments: tuple[str, ...]
    disk: int
    minutes: float


@dataclass(frozen=True)
class Job:
    """One command of a round of a benchmark; minutes: on two cores that nobody else uses.

    `{name}` in an argument stands for the file of that name. The results of all jobs of a benchmark make its entry.
    """

    group: str
    benchmark: str
    module: str
    minutes: float
    arguments: tuple[str, ...] = ()
    files: tuple[File, ...] = ()
    part: str = ""

    @property
    def name(self) -> str:
        return self.benchmark + (f".{self.part}" if self.part else "")

    @property
    def command(self) -> str:
        """As RESULTS.json shows it, with upper-case names for files."""
        shown = {file.name: file.name.upper() for file in self.files}
        arguments = (argument.format_map(shown) for argument in self.arguments)
        return " ".join(["python -m", self.module, *arguments])


def store(layers: int, disk: int, minutes: float) -> File:
    arguments = (SHAPE, "{file}", "--layers", str(layers))
    return File(f"store_{layers}", "benchmarks.synthetic_store", arguments, disk, minutes)


STORE_4, STORE_8, STORE_40 = store(4, 4 * 10**9, 0.3), store(8, 6 * 10**9, 0.4), store(40, 21 * 10**9, 2.0)
CHECKPOINT = File(
    "checkpoint", "benchmarks.bf16_checkpoint", (SHAPE, "{file}", "--layers", "4"), 14 * 10**9, 1.0
)  # fmt: skip
PEER = File("peer", "benchmarks.decode", ("--work", "{file}", "--prepare"), 12 * 10**9, 1.5)


def streaming(part: str, minutes: float, file: File = STORE_8, rounds: int = 1) -> Job:
    arguments = ("--store", f"{{{file.name}}}", "--only", part, "--rounds", str(rounds))
    benchmark = "stream" if file is not STORE_40 else "stream_40_layers"
    return Job("streaming" if file is not STORE_40 else "large", benchmark, "benchmarks.stream", minutes,
               arguments, (file,), part)  # fmt: skip


def verifying(group: str, benchmark: str, minutes: float, file: File) -> Job:
    return Job(group, benchmark, "benchmarks.verification", minutes, (f"{{{file.name}}}", "--rounds", "1"), (file,))


JOBS = (
    Job("kernels", "cpu_kernels", "benchmarks.cpu_kernels", 0.8),
    Job("kernels", "engine", "benchmarks.engine", 0.3),
    Job("corpus", "demo_model", "benchmarks.demo_model", 0.8),
    streaming("decode_direct", 0.8, rounds=2),
    streaming("decode_warm", 1.3, rounds=3),
    streaming("prefill_2048", 1.5),
    streaming("decode_32k", 0.8, rounds=3),
    streaming("plan", 2.0, STORE_4),
    streaming("peak", 1.2, STORE_4),
    verifying("streaming", "verification", 1.0, STORE_4),
    Job("converting", "conversion", "benchmarks.conversion", 1.0,
        ("--source", "{checkpoint}", "--rounds", "1"), (CHECKPOINT,)),
    Job("llama", "decode", "benchmarks.decode", 3.5, ("--work", "{peer}", "--rounds", "2"), (PEER,)),
    Job("capped", "capped", "benchmarks.capped", 5.0, ("--work", "{peer}", "--rounds", "1"), (PEER,)),
    streaming("decode_direct", 1.2, STORE_40, rounds=2),
    verifying("large", "verification_40_layers", 2.5, STORE_40),
)  # fmt: skip


def no_llama() -> str | None:
    found = all(importlib.util.find_spec(name) for name in ("llama_cpp", "gguf"))
    return None if found else "llama-cpp-python and gguf are not installed (pip install '.[benchmarks]')"


def no_root() -> str | None:
    return no_llama() or (None if os.geteuid() == 0 else "locking memory needs root")


def no_corpus() -> str | None:
    return None if shutil.which("bible") else "Debian's program bible (package bible-kjv) is not installed"


# Why a group cannot be had here; "large" is run when it is asked for.
GROUPS: dict[str, Callable[[], str | None]] = {
    "kernels": lambda: None,
    "streaming": lambda: None,
    "converting": lambda: None,
    "corpus": no_corpus,
    "llama": no_llama,
    "capped": no_root,
    "large": lambda: None,
}
ON_REQUEST = ("large",)
