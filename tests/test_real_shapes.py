"""One layer of the real 35B shapes: memory stays flat while 3.7 GB become a store."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from real_shapes import write_real_shapes

MEASURED = """
import json, resource, sys
from mlx_ttd.store import convert, info, verify

scale = 1 if sys.platform == "darwin" else 1024
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
before = peak()
convert(sys.argv[1], sys.argv[2])
converted = peak() - before
verify(sys.argv[2])
print(json.dumps({"convert": converted, "verify": peak() - before, **info(sys.argv[2])}))
"""


@pytest.mark.slow
def test_conversion_and_verification_in_little_memory(tmp_path: Path) -> None:
    source = write_real_shapes(tmp_path / "src", layers=1)
    command = [sys.executable, "-c", MEASURED, str(source), str(tmp_path / "store")]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=500).stdout)
    assert found["record_strides"] == [1_769_472]
    assert found["parts"]["experts"] == 16_384 + 256 * 1_769_472
    assert found["convert"] < 700e6
    assert found["verify"] < 400e6
    shutil.rmtree(tmp_path)
