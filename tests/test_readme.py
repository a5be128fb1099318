"""The documents cannot rot: their commands and Python run, and the flags and names they give exist."""

from __future__ import annotations

import os
import pkgutil
import shlex
import subprocess
import sys
from importlib.resources import files
from itertools import groupby
from pathlib import Path

import pytest
import typer
from documents import ROOT, Block, blocks, flags_named, flags_of_scripts, names_given

from benchmarks import forecasts
from mlx_ttd.cli import app

ELSEWHERE = {
    "python3 -m venv .venv": "README's are run by .ci/run in fresh clones, the editable install by test_packaging",
    ".venv/bin/pip": "test_packaging",
    ".venv/bin/ruff": ".ci/run",
    ".venv/bin/pytest": ".ci/run",
}
FOREIGN = {"--check"}
COMMANDS = [(block, line) for block in blocks("sh") for line in block.text.splitlines() if line and line[0] != "#"]
QUICK = ("mlx-ttd",)
OWN = [
    pytest.param(block, line, id=f"{block.document}: {line}", marks=() if line.startswith(QUICK) else pytest.mark.slow)
    for block, line in COMMANDS
    if not line.startswith(tuple(ELSEWHERE))
]


def options(command) -> set[str]:
    return {name for parameter in command.params for name in [*parameter.opts, *parameter.secondary_opts]} | {"--help"}


CLI = typer.main.get_command(app)


@pytest.fixture
def sandbox(tmp_path, monkeypatch) -> Path:
    """A directory where `mlx-ttd` is a command and the names that the documents use for a model are the demo model."""
    script = tmp_path / "bin/mlx-ttd"
    script.parent.mkdir()
    script.write_text(f"#!{sys.executable}\nfrom mlx_ttd.cli import main\n\nmain()\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    (tmp_path / "qwen3.6-35b-a3b.ttd").symlink_to(str(files("mlx_ttd") / "demo" / "store"))
    return tmp_path


def run_block(block: Block, command: list[str], cwd: Path) -> None:
    if block.reason:
        pytest.skip(f"not run: {block.reason}")
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{block.name}\n{done.stdout}\n{done.stderr}"
    assert done.stdout.strip(), f"{block.name} printed nothing"


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.name)
def test_python_block_runs(block, sandbox):
    run_block(block, [sys.executable, "-W", "error", "-c", block.text], sandbox)


@pytest.mark.parametrize(("block", "line"), OWN)
def test_command_runs(block, line, sandbox):
    run_block(block, ["bash", "-euc", line], sandbox if line.startswith("mlx-ttd") else ROOT)


def test_the_readme_opens_with_the_two_commands_that_ci_runs():
    first, second = [block.text for block in blocks("sh") if block.document == "README.md"][:2]
    setup = "python3 -m venv .venv && .venv/bin/pip install "
    assert first == setup + '. && .venv/bin/mlx-ttd generate "In the beginning"\n'
    assert second == setup + "-e '.[test]' && .venv/bin/pytest\n"


def test_each_flag_of_a_command_belongs_to_it():
    for block, line in COMMANDS:
        words = shlex.split(line, comments=True)
        for joined, command in groupby(words, {"&&", "|", ";"}.__contains__):
            words = list(command)
            if not joined and words[0].endswith("mlx-ttd"):
                name = next((word for word in words[1:] if not word.startswith("-")), None)
                known = options(CLI) | (options(CLI.commands[name]) if name else set())
                flags = {word.split("=")[0] for word in words if word.startswith("-")}
                assert flags <= known, f"{block.name}: {words}"


def test_each_flag_named_in_a_document_or_docstring_exists():
    known = options(CLI).union(*(options(command) for command in CLI.commands.values()))
    unknown = {flag: sorted(where) for flag, where in flags_named().items() if flag not in known}
    unknown = {flag: where for flag, where in unknown.items() if flag not in flags_of_scripts() | FOREIGN}
    assert unknown == {}


@pytest.mark.parametrize("name", sorted(names_given()))
def test_each_name_of_the_package_exists(name):
    assert pkgutil.resolve_name(name) is not None


@pytest.mark.parametrize("document", ["README.md", "benchmarks/RESULTS.md"])
def test_forecasts_are_labelled_and_those_of_the_command(document):
    text, rows = (ROOT / document).read_text(), "\n".join(forecasts.table())
    assert rows in text
    assert "orecast" in text.partition(rows)[0][-600:]
