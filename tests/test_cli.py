"""The command line: text on standard output, the rest on standard error, one sentence and exit code 2 for bad input."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
from checkpoints import tiny
from typer.testing import CliRunner

import mlx_ttd
from mlx_ttd import cli
from mlx_ttd.options import Options

MEMORY = ["--memory", "300MB"]


def run(*arguments, stdin=None, timeout=120, shell='"$@"', **environment):
    words = [sys.executable, "-m", "mlx_ttd", *map(str, arguments)]
    return subprocess.run(
        ["bash", "-c", shell, "bash", *words],
        capture_output=True,
        encoding="utf-8",
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


@pytest.mark.parametrize(
    ("name", "value", "arguments", "words"),
    [
        ("CONTEXT", "1", ["generate", "In the beginning"], "reserved for 1"),
        ("POLICY", "bogus", ["chat"], "choose one of"),
        ("POLICY", "bogus", ["trace", "demo", "--prompt", "And", "-o", "nowhere"], "choose one of"),
        ("MEMORY", "1MB", ["bench"], "at least"),
        ("MEMORY", "1MB", ["trace", "demo", "--prompt", "And", "-o", "nowhere"], "at least"),
        ("CONTEXT", "0", ["info"], "out of range"),
    ],
)
def test_the_environment_sets_what_is_not_given(capsys, monkeypatch, tmp_path, name, value, arguments, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(f"MLX_TTD_{name}", value)
    code, _, err = call(capsys, monkeypatch, *arguments)
    assert (code, words in err) == (2, True)


@pytest.mark.parametrize("command", [["generate", "And", "-n", "1"], ["chat"]])
def test_wiring_and_progress_are_defaults_alone(capsys, monkeypatch, command):
    found, real = [], mlx_ttd.api.load
    monkeypatch.setattr(mlx_ttd.api, "load", lambda *a, **k: found.append(real(*a, **k)) or found[-1])
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert call(capsys, monkeypatch, *command, *MEMORY)[0] == 0
    monkeypatch.setenv("MLX_TTD_WIRE", "0")
    monkeypatch.setenv("MLX_TTD_PROGRESS", "0")
    assert call(capsys, monkeypatch, *command, *MEMORY)[0] == 0
    assert [(llm.options.wire, llm.options.progress) for llm in found] == [(True, True), (False, False)]


def test_what_is_given_wins_over_the_environment(capsys, monkeypatch):
    monkeypatch.setenv("MLX_TTD_CONTEXT", "77")
    monkeypatch.setenv("MLX_TTD_MEMORY", "150MB")
    assert json.loads(call(capsys, monkeypatch, "info", "--json")[1])["context"] == 77
    assert json.loads(call(capsys, monkeypatch, "info", "--json", "--context", 99)[1])["context"] == 99
    assert json.loads(call(capsys, monkeypatch, "plan", "demo", "--json")[1])["memory"] == 150_000_000
    found = call(capsys, monkeypatch, "plan", "demo", "--json", "--memory", "200MB")
    assert json.loads(found[1])["memory"] == 200_000_000


def test_help_shows_the_defaults_of_the_library():
    shown = CliRunner().invoke(cli.app, ["generate", "--help"], env={"COLUMNS": "200"}).output
    for name in ("memory", "context", "policy"):
        assert f"[default: ({getattr(Options(), name)})]" in shown


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["generate", "And", "-n", "2", *MEMORY], ["info"], ["--help"]])
def test_output_that_cannot_be_written_is_one_sentence(tmp_path, arguments, unbuffered):
    full = f"ulimit -f 0; \"$@\" > '{tmp_path / 'out'}'"
    done = run(*arguments, shell=full, PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == 2
    assert "standard output cannot be written: File too large" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_closed_streams_and_characters_that_cannot_be_written():
    closed = run("chat", *MEMORY, shell='"$@" <&-')
    assert closed.returncode == 2
    assert closed.stderr.startswith("mlx-ttd: standard input is closed")
    assert run("generate", "And", "-n", 2, *MEMORY, shell='"$@" 2>&-').returncode == 0
    done = run("generate", "Adé", "-n", 2, *MEMORY, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout[:3]) == (0, "Ad?")
    assert run("chat", "-n", 2, *MEMORY, stdin="Adé\n", PYTHONIOENCODING="ascii").returncode == 0


def test_a_message_longer_than_the_context_does_not_end_a_chat(capsys, monkeypatch):
    asked, real = [], mlx_ttd.LLM.stream
    monkeypatch.setattr(mlx_ttd.LLM, "stream", lambda llm, *a, **k: asked.append(a[0]) or real(llm, *a, **k))
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"Genesis\n{'word ' * 400}\nAnd then?\n"))
    code, out, err = call(capsys, monkeypatch, "chat", "-n", 3, "--context", 200, "--temperature", 0, *MEMORY)
    assert code == 0
    assert "mlx-ttd: the prompt has" in err
    assert len(out.splitlines()) == 2
    assert [len(messages) for messages in asked] == [1, 3, 3]
    assert [message["content"] for message in asked[-1]][::2] == ["Genesis", "And then?"]


@pytest.mark.parametrize(
    "arguments", [["--temperature", "-1"], ["--top-p", "0"], ["--memory", "1MB"], ["--context", "1"]]
)
def test_what_is_refused_prints_no_prompt(capsys, monkeypatch, arguments):
    code, out, _ = call(capsys, monkeypatch, "generate", "In the beginning", *arguments)
    assert (code, out) == (2, "")


def test_options_of_a_generation_are_checked_before_loading(capsys, monkeypatch):
    monkeypatch.setattr(mlx_ttd.api, "load", lambda *_, **__: pytest.fail("loaded"))
    for command in (["generate", "And"], ["chat"]):
        assert call(capsys, monkeypatch, *command, "--temperature", "-1")[0] == 2


@pytest.mark.parametrize("name", ["missing/x.png", "x.gif", "folder.png"])
def test_a_drawing_that_cannot_be_written_is_refused_before_measuring(capsys, monkeypatch, tmp_path, name):
    monkeypatch.setattr(cli, "sweep", lambda *_: pytest.fail("measured"))
    (tmp_path / "folder.png").mkdir()
    code, _, err = call(capsys, monkeypatch, "bench", "--sweep", "100MB:120MB", "--png", tmp_path / name)
    assert (code, "--png" in err) == (2, True)


def test_a_tolerance_that_is_none_is_refused(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert call(capsys, monkeypatch, "trace", "demo", "--prompt", "And", "-o", "a", *MEMORY)[0] == 0
    assert call(capsys, monkeypatch, "diff", "a", "a", "--atol", 0.5)[0] == 0
    for atol in ("-1", "nan", "inf"):
        code, _, err = call(capsys, monkeypatch, "diff", "a", "a", "--atol", atol)
        assert (code, "atol is" in err) == (2, True)


def test_commands_in_messages_quote_their_paths(capsys, monkeypatch, tmp_path):
    source = tiny(tmp_path / "a source")
    _, _, err = call(capsys, monkeypatch, "info", source)
    assert f"`mlx-ttd convert '{source}' 'a source.ttd'`" in err
    code, out, _ = call(capsys, monkeypatch, "convert", source, tmp_path / "a store")
    assert code == 0
    assert f"`mlx-ttd info '{tmp_path / 'a store'}'`" in out


def test_an_unknown_environment_variable_is_refused(capsys, monkeypatch):
    monkeypatch.setenv("MLX_TTD_COLOUR", "red")
    code, _, err = call(capsys, monkeypatch, "generate", "And", *MEMORY)
    assert code == 2
    assert "MLX_TTD_COLOUR" in err
