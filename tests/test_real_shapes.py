"""One layer of the real 35B shapes: memory stays flat while 3.7 GB become a store."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.bf16_checkpoint import write_checkpoint
from mlx_ttd.store import info

# On Linux ru_maxrss starts at the parent's; VmHWM does not.
MEASURED = """
import re, resource, sys
from mlx_ttd.store import convert, verify

def peak():
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1]) * 1024

before = peak()
{"convert": convert, "verify": verify}[sys.argv[1]](*sys.argv[2:])
print(peak() - before)
"""


def peak_of(*call: str | Path) -> int:
    """Bytes over an idle import at the peak of one call in a process of its own."""
    command = [sys.executable, "-c", MEASURED, *map(str, call)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=500).stdout)


@pytest.mark.slow
def test_conversion_and_verification_in_little_memory(tmp_path: Path) -> None:
    source = write_checkpoint("qwen3.6-35b-a3b", tmp_path / "src", layers=1)
    assert peak_of("convert", source, tmp_path / "store") < 700e6
    found = info(tmp_path / "store")
    assert found["record_strides"] == [1_769_472]
    assert found["parts"]["experts"] == 16_384 + 256 * 1_769_472
    assert peak_of("verify", tmp_path / "store") < 100e6
    shutil.rmtree(tmp_path)
