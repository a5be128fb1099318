"""The command line: text on standard output, the rest on standard error, one sentence and exit code 2 for bad input."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import mlx_ttd
from mlx_ttd import cli

MEMORY = ["--memory", "300MB"]


def run(*arguments, stdin=None, timeout=120, **environment):
    return subprocess.run(
        [sys.executable, "-m", "mlx_ttd", *map(str, arguments)],
        capture_output=True,
        text=True,
        input=stdin,
        timeout=timeout,
        env={**os.environ, **environment},
    )


def call(capsys, monkeypatch, *arguments):
    """(exit code, output, errors) of main() in this process."""
    monkeypatch.setattr(sys, "argv", ["mlx-ttd", *map(str, arguments)])
    code = 0
    try:
        cli.main()
    except SystemExit as exit_:
        code = exit_.code or 0
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def damaged(tmp_path):
    shutil.copytree(mlx_ttd.demo_path(), tmp_path / "store")
    return tmp_path / "store"


def test_generate_writes_text_apart_from_statistics():
    done = run("generate", "In the beginning", "-n", 8, *MEMORY)
    assert done.returncode == 0
    assert done.stdout.startswith("In the beginning of the")
    assert "expert requests" in done.stderr
    quiet = run("generate", "In the beginning", "-n", 8, "--quiet", *MEMORY)
    assert quiet.stderr == ""
    assert done.stdout == "In the beginning" + quiet.stdout


def test_chat_keeps_history_and_ends_at_end_of_input():
    done = run("chat", "-n", 6, "--temperature", 0, *MEMORY, stdin="Genesis 1:1\nAnd then?\n")
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) >= 2


def test_interrupt_ends_cleanly_with_the_text_so_far():
    command = [sys.executable, "-u", "-m", "mlx_ttd", "generate", "In the beginning", "-n", "4000", *MEMORY]
    # A run that was itself started in the background hands an ignored SIGINT down.
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    first = process.stdout.read(40)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert first.startswith("In the beginning of the")
    assert process.returncode == 0
    assert "interrupted" in errors
    assert "Traceback" not in errors


def test_info_and_verify(capsys, monkeypatch):
    code, out, _ = call(capsys, monkeypatch, "info", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["experts"] == 24
    assert found["least_bytes"] > found["resident_bytes"]
    assert call(capsys, monkeypatch, "info")[0] == 0
    assert call(capsys, monkeypatch, "verify")[0] == 0


def test_version_and_help(capsys, monkeypatch):
    assert call(capsys, monkeypatch, "--version")[1].strip() == mlx_ttd.__version__
    names = [command.callback.__name__ for command in cli.app.registered_commands]
    for name in names:
        result = CliRunner().invoke(cli.app, [name, "--help"], env={"COLUMNS": "200"})
        assert result.exit_code == 0
        assert "--" in result.output


def flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def edit_json(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def break_template(store):
    (store / "chat_template.jinja").write_text("{{ raise_exception('no such luck') }}")


BROKEN = {
    "a flipped bit": (
        lambda s: flip(s / "experts/layer-002.safetensors", 16_384 + 5 * 32_768 + 9),
        "layer 2, expert 5",
    ),
    "a truncated file": (lambda s: os.truncate(s / "experts/layer-001.safetensors", 50_000), "layer-001"),
    "a missing file": (lambda s: (s / "resident.safetensors").unlink(), "resident.safetensors"),
    "a newer store": (lambda s: edit_json(s / "manifest.json", version=99), "version 99"),
    "no manifest": (lambda s: (s / "manifest.json").unlink(), "checkpoint, not a store"),
    "an unknown model": (
        lambda s: edit_json(s / "config.json", model_type="x", text_config={"model_type": "gpt9"}),
        "gpt9",
    ),
    "broken json": (lambda s: (s / "config.json").write_text("{"), "config.json"),
    "a raising template": (break_template, "no such luck"),
    "a broken tokenizer": (lambda s: (s / "tokenizer.json").write_text("{}"), "tokenizer.json"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_store_is_one_sentence(damaged, capsys, monkeypatch, name):
    break_it, words = BROKEN[name]
    break_it(damaged)
    code, _, err = call(
        capsys,
        monkeypatch,
        "generate",
        "In the beginning God created the heaven",
        "--chat",
        "-m",
        damaged,
        "-n",
        30,
        *MEMORY,
    )
    assert code == 2
    assert words in err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("where", ["top", "text_config"])
def test_an_expert_count_that_disagrees_is_one_sentence(damaged, capsys, monkeypatch, where):
    config = json.loads((damaged / "config.json").read_text())
    (config if where == "top" else config["text_config"])["num_experts"] = 32
    if where == "top":
        config = {**config.pop("text_config"), "num_experts": 32}
    (damaged / "config.json").write_text(json.dumps(config))
    code, _, err = call(capsys, monkeypatch, "generate", "And", "-m", damaged, *MEMORY)
    assert code == 2
    assert "num_experts 32" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "", *MEMORY], "empty"),
        (["generate", "And", "--memory", "1MB"], "at least"),
        (["generate", "And", "--memory", "lots"], "lots"),
        (["generate", "And", "--policy", "best", *MEMORY], "lfu"),
        (["generate", "And", "--temperature", "-1", *MEMORY], "temperature"),
        (["generate", "And", "-n", "0", *MEMORY], "max_tokens"),
        (["generate", "And " * 5000, *MEMORY], "context"),
        (["generate", "And", "-m", "nowhere"], "nowhere"),
        (["generate", "And", "--frobnicate"], "frobnicate"),
        (["generate", "And", "--context", "0", *MEMORY], "context"),
        (["convert", "nowhere", "new.ttd"], "nowhere"),
        (["verify", "nowhere"], "nowhere"),
        (["info", "nowhere"], "nowhere"),
    ],
)
def test_bad_arguments_are_one_sentence_and_exit_code_2(capsys, monkeypatch, arguments, words):
    code, _, err = call(capsys, monkeypatch, *arguments)
    assert code == 2
    assert words in err
    assert "Traceback" not in err


def test_an_unknown_environment_variable_is_refused(capsys, monkeypatch):
    monkeypatch.setenv("MLX_TTD_COLOUR", "red")
    code, _, err = call(capsys, monkeypatch, "generate", "And", *MEMORY)
    assert code == 2
    assert "MLX_TTD_COLOUR" in err
