"""The stand-alone C++ tests of the native operations, without Python or MLX, under sanitizers."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

CPU = Path(__file__).parent.parent / "csrc" / "cpu"
COMPILER = shutil.which("g++") or shutil.which("clang++")
PROGRAMS = ("operations", "sequence", "pool", "quantize", "read_pool")
BINDINGS = ("bindings.cpp", "primitive.cpp", "stored_matrix.cpp", "operations.cpp")


def instruction_sets() -> list[tuple[str, list[str]]]:
    """Name and compiler options of each, as the build has them."""
    lines = re.findall(r"ttd_operations\((\w+)\s*([^)]*)\)\n", (CPU / "CMakeLists.txt").read_text())
    found = [(name, options.split()) for name, options in lines if "$" not in name]
    return found if platform.machine() == "x86_64" else found[:1]


def compile_all(sanitizer: str, folder: Path) -> tuple[list[Path], list[Path]]:
    """The objects of the programs, and those that all share, not optimised: that would take many minutes."""
    common = ["-std=c++20", "-g1", "-ffp-contract=off", "-fno-math-errno", "-w", f"-fsanitize={sanitizer}"]
    plain = [p for p in CPU.glob("*.cpp") if not p.name.startswith("bind_") and p.name not in BINDINGS]
    jobs = [(folder / f"{name}.o", CPU / "operations.cpp", options) for name, options in instruction_sets()]
    programs = [(folder / f"{name}.o", CPU / "tests" / f"test_{name}.cpp", ["-O1", f"-I{CPU}"]) for name in PROGRAMS]
    jobs += programs + [(folder / f"{p.stem}_core.o", p, []) for p in plain]

    def build(job: tuple[Path, Path, list[str]]) -> Path:
        target, source, options = job
        subprocess.run([str(COMPILER), *common, *options, "-c", str(source), "-o", str(target)], check=True)
        return target

    with ThreadPoolExecutor(os.cpu_count()) as workers:
        objects = list(workers.map(build, jobs))
    own = [target for target, _, _ in programs]
    return own, [path for path in objects if path not in own]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_the_core_under(sanitizer, tmp_path):
    own, shared = compile_all(sanitizer, tmp_path)
    stop = {"UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1"}
    for object_ in own:
        program = object_.with_suffix("")
        subprocess.run(
            [str(COMPILER), f"-fsanitize={sanitizer}", "-pthread", object_, *shared, "-o", program], check=True
        )
        # A child of a process with threads may not start its own under ThreadSanitizer.
        arguments = ["threads alone"] if sanitizer == "thread" else []
        run = subprocess.run([str(program), *arguments], capture_output=True, text=True, env={**os.environ, **stop})
        assert run.returncode == 0, run.stdout + run.stderr
