"""The list of allowed skips is enforced, and the run says how many tests ran."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parent / "conftest.py"


def run_suite(folder: Path, allowed: str, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST.read_text())
    (folder / "allowed_skips.txt").write_text(allowed)
    (folder / "test_sample.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", str(folder)]
    plain = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run([*command, str(folder)], capture_output=True, text=True, cwd=folder, env=plain)


@pytest.mark.parametrize(
    "skip",
    [
        "import pytest\n\ndef test_one(): pass\n\ndef test_two(): pytest.skip('rain')\n",
        "import pytest\n\ndef test_one(): pass\n\n@pytest.mark.skip(reason='rain')\ndef test_two(): pass\n",
    ],
)
@pytest.mark.parametrize(("allowed", "code"), [("# none\n", 1), ("r*n\n", 0)])
def test_only_listed_skips_pass(tmp_path, skip, allowed, code):
    run = run_suite(tmp_path, allowed, skip)
    assert run.returncode == code, run.stdout
    assert f"1 tests ran; 1 were skipped, {code} without leave" in run.stdout
    assert run.stdout.rstrip().splitlines()[-1].startswith("=")


def test_a_module_that_skips_itself_is_noticed(tmp_path):
    run = run_suite(tmp_path, "", "import pytest\npytest.importorskip('no_such_module')\n")
    assert run.returncode != 0
    assert "without leave" in run.stdout
    assert "no_such_module" in run.stdout
