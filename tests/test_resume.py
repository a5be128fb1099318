"""A conversion killed anywhere, then called again, gives the very store that an undisturbed one gives."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import MOE, hf_tensors, tiny, values, write

from mlx_ttd.errors import ConversionError
from mlx_ttd.spec import model_spec
from mlx_ttd.store import convert, verify
from mlx_ttd.store.journal import Journal

# Dies by SIGKILL at its n-th system call that changes the disk, before the call (an even n) or after it.
KILLED = """
import itertools, os, signal, sys
from mlx_ttd.store import convert

last = int(sys.argv[3])
count = itertools.count(1)  # its next is one step of the interpreter, so no two threads get one number

def dying(call):
    def wrapped(*arguments, **keywords):
        number = next(count)
        if number == last and last % 2 == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        found = call(*arguments, **keywords)
        if number == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return found
    return wrapped

for name in ("pwrite", "fsync", "replace", "rename", "rmdir", "unlink", "mkdir"):
    setattr(os, name, dying(getattr(os, name)))
convert(sys.argv[1], sys.argv[2])
print("calls", next(count) - 1)
"""


def run(source: Path, store: Path, calls: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", KILLED, str(source), str(store), str(calls)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def contents(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = model_spec(MOE)
    tensors = hf_tensors(spec, values(spec, mtp=True))
    return write(tmp_path_factory.mktemp("source") / "src", MOE, tensors, extra={"tokenizer.json": "{}"})


def kill_and_resume(source: Path, root: Path, calls: int, wanted: dict[str, bytes]) -> None:
    store = root / f"killed-{calls}"
    killed = run(source, store, calls)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    if not store.exists():
        convert(source, store)
    assert contents(store) == wanted, calls
    verify(store)


def test_a_killed_conversion_resumes(source: Path, tmp_path: Path) -> None:
    wanted = contents(convert(source, tmp_path / "whole"))
    kill_and_resume(source, tmp_path, 77, wanted)


@pytest.mark.slow
def test_twenty_random_kills(source: Path, tmp_path: Path) -> None:
    wanted = contents(convert(source, tmp_path / "whole"))
    undisturbed = run(source, tmp_path / "counted", 1_000_000)
    total = int(undisturbed.stdout.split()[-1])
    assert total > 200
    picks = random.Random(20).sample(range(1, total + 1), 16)
    for calls in [1, total - 1, total - 2, total - 3, *picks]:
        kill_and_resume(source, tmp_path, calls, wanted)


def test_a_conversion_killed_twice(source: Path, tmp_path: Path) -> None:
    wanted = contents(convert(source, tmp_path / "whole"))
    for calls in (60, 90):
        assert run(source, tmp_path / "dst", calls).returncode == -signal.SIGKILL
    assert contents(convert(source, tmp_path / "dst")) == wanted


def test_a_changed_checkpoint_starts_again(tmp_path: Path) -> None:
    assert run(tiny(tmp_path / "a"), tmp_path / "dst", 120).returncode == -signal.SIGKILL
    other = tiny(tmp_path / "b", seed=1)
    assert contents(convert(other, tmp_path / "dst")) == contents(convert(other, tmp_path / "whole"))


def test_two_conversions_to_one_name_do_not_mix(source: Path, tmp_path: Path) -> None:
    with Journal(tmp_path / "dst.partial"), pytest.raises(ConversionError, match="Another conversion is at work"):
        convert(source, tmp_path / "dst")
    convert(source, tmp_path / "dst")
