"""A full run of benchmarks goes on where it was cut, keeps medians of a clean tree, and times no references."""

from __future__ import annotations

import argparse
import json
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from documents import ROOT

import benchmarks.__main__ as command_line
import mlx_ttd
from benchmarks import command, engine, full_run
from benchmarks.commits import unclean
from benchmarks.full_run import DONE, FAILED, MORE, FullRun
from benchmarks.jobs import GROUPS, JOBS, File, Job
from benchmarks.record import read

# A benchmark whose n-th run gives n, appends a line to a log, and may sleep or fail.
FAKE = """
import json, pathlib, sys, time
here, name = pathlib.Path(__file__).parent, sys.argv[1]
with (here / "log").open("a") as log:
    print(name, file=log)
runs = (here / "log").read_text().split().count(name)
if name == "file":
    pathlib.Path(sys.argv[2]).mkdir()
if name == "slow":
    time.sleep(float((here / "sleep").read_text()))
if name == "fails":
    sys.exit("it does not work")
if "--json" in sys.argv:
    found = {"machine": {"cores": 2}, "results": {f"{name}.x": float(runs)}}
    pathlib.Path(sys.argv[sys.argv.index("--json") + 1]).write_text(json.dumps(found))
"""
MADE = File("made", "fake_benchmark", ("file", "{file}"), 1000, 0.01)


def job(name: str, group: str = "one", files: tuple[File, ...] = (), part: str = "", minutes: float = 0.01) -> Job:
    arguments = (name, *(f"{{{file.name}}}" for file in files))
    return Job(group, (part and "whole") or name, "fake_benchmark", minutes, arguments, files, part)


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the fake benchmark, on the path of what is run; the tree is clean, its commit abc."""
    (tmp_path / "fake_benchmark.py").write_text(FAKE)
    (tmp_path / "sleep").write_text("0")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(full_run, "unclean", lambda root: [])
    monkeypatch.setattr(full_run, "head", lambda root: "abc")
    monkeypatch.setattr(full_run, "changed_since", lambda *given: False)
    return tmp_path


def made(fakes: Path, jobs: list[Job], rounds: int = 3, minutes: float | None = None, scratch: bool = False) -> FullRun:
    run = FullRun(jobs, fakes / "work", rounds, minutes, scratch)
    run.results = fakes / "RESULTS.json"
    return run


def log(fakes: Path) -> list[str]:
    path = fakes / "log"
    return path.read_text().split() if path.exists() else []


def test_rounds_alternate_within_a_group_and_give_medians_with_the_commit(fakes):
    assert made(fakes, [job("a"), job("b"), job("c", "two")]).go() == DONE
    assert log(fakes) == [*"ababab", *"ccc"]
    results = read(fakes / "RESULTS.json")
    assert results["a"]["results"] == {"a.x": {"median": 2.0, "least": 1.0, "greatest": 3.0, "rounds": 3}}
    assert results["c"]["commit"] == "abc"
    assert results["c"]["commands"] == ["python -m fake_benchmark c"]
    assert list((fakes / "work").iterdir()) == []


def test_parts_of_a_benchmark_make_one_entry(fakes):
    assert made(fakes, [job("a", part="first"), job("b", part="second")]).go() == DONE
    assert set(read(fakes / "RESULTS.json")["whole"]["results"]) == {"a.x", "b.x"}


def test_a_run_goes_on_where_its_minutes_ended(fakes):
    jobs = [job("a", minutes=1.0), job("b", minutes=1.0)]
    statuses = []
    while not statuses or statuses[-1] == MORE:
        assert len(statuses) < 9
        # What a round is expected to take is more than all the minutes, so each part does one.
        for path in (fakes / "work").glob("state.json"):
            state = json.loads(path.read_text())
            path.write_text(json.dumps(state | {"seconds": dict.fromkeys(state["seconds"], 60.0)}))
        statuses.append(made(fakes, jobs, minutes=0.5).go())
    assert statuses == [MORE] * 5 + [DONE]
    assert log(fakes) == [*"ababab"]
    assert read(fakes / "RESULTS.json")["b"]["results"]["b.x"]["rounds"] == 3


DRIVER = """
import sys
from pathlib import Path
import benchmarks.__main__
from benchmarks import full_run
sys.path.insert(0, "tests")
from test_full_run import job, made
full_run.unclean, full_run.head, full_run.changed_since = lambda root: [], lambda root: "abc", lambda *given: False
benchmarks.__main__.stop_on_signals()
sys.exit(made(Path(sys.argv[1]), [job("quick"), job("slow")]).go())
"""


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_run_that_was_killed_in_a_round_repeats_that_round_alone(fakes, sent):
    (fakes / "sleep").write_text("60")
    process = subprocess.Popen([sys.executable, "-c", DRIVER, str(fakes)], cwd=ROOT, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while "slow" not in log(fakes):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(sent)
    assert process.wait(30) != 0
    (fakes / "sleep").write_text("0")
    assert made(fakes, [job("quick"), job("slow")]).go() == DONE
    assert log(fakes) == ["quick", "slow", "slow", "quick", "slow", "quick", "slow"]
    figure = read(fakes / "RESULTS.json")["slow"]["results"]["slow.x"]
    # The one that was cut, the first, is in none of them.
    assert figure == {"median": 3.0, "least": 2.0, "greatest": 4.0, "rounds": 3}


def test_a_round_that_the_end_of_the_minutes_cuts_is_run_again(fakes, monkeypatch):
    monkeypatch.setattr(full_run, "GRACE", 1.0)
    (fakes / "sleep").write_text("60")
    jobs = [job("quick"), job("slow", minutes=0.001)]
    assert made(fakes, jobs, rounds=1, minutes=0.02).go() == MORE
    (fakes / "sleep").write_text("0")
    assert made(fakes, jobs, rounds=1, minutes=1).go() == DONE
    assert log(fakes) == ["quick", "slow", "slow"]


def test_a_benchmark_that_fails_stops_no_other_and_records_nothing(fakes, capsys):
    jobs = [job("fails"), job("a")]
    assert made(fakes, jobs).go() == FAILED
    assert log(fakes) == ["fails", "a", "a", "a"]
    assert set(read(fakes / "RESULTS.json")) == {"a"}
    assert "it does not work" in capsys.readouterr().out
    assert made(fakes, jobs).go() == FAILED
    assert log(fakes)[4:] == ["fails"]


def test_files_are_written_once_and_removed_with_their_last_job(fakes):
    run = made(fakes, [job("a", files=(MADE,)), job("b", "two")])
    seen = []
    record = run.round
    run.round = lambda job: (record(job), seen.append((fakes / "work/made").exists()))  # type: ignore[method-assign]
    assert run.go() == DONE
    assert log(fakes) == ["file", *"aaabbb"]
    assert seen == [True, True, True, False, False, False]
    assert list((fakes / "work").iterdir()) == []


def test_too_little_disk_is_said_before_a_file_is_written(fakes, capsys):
    huge = File("made", "fake_benchmark", ("file", "{file}"), 10**18, 0.01)
    assert made(fakes, [job("a", files=(huge,))]).go() == FAILED
    assert "GB are free" in capsys.readouterr().out
    assert log(fakes) == []


def test_figures_of_a_scratch_run_are_not_recorded_nor_taken_into_one_that_is(fakes):
    assert made(fakes, [job("a")], rounds=1, scratch=True).go() == DONE
    assert not (fakes / "RESULTS.json").exists()
    jobs = [job("a"), job("fails")]
    assert made(fakes, jobs, scratch=True).go() == FAILED
    with pytest.raises(SystemExit, match="begun with --scratch"):
        made(fakes, jobs)


def test_a_run_of_other_code_is_not_gone_on_with(fakes, monkeypatch):
    jobs = [job("a"), job("fails")]
    assert made(fakes, jobs).go() == FAILED
    monkeypatch.setattr(full_run, "changed_since", lambda *given: True)
    with pytest.raises(SystemExit, match="which has changed"):
        made(fakes, jobs)


def test_an_unclean_tree_is_refused_but_for_scratch(fakes, monkeypatch):
    monkeypatch.setattr(full_run, "unclean", lambda root: ["mlx_ttd/llm.py"])
    with pytest.raises(SystemExit, match=r"mlx_ttd/llm\.py differs from the commit"):
        made(fakes, [job("a")])
    assert made(fakes, [job("a")], scratch=True).go() == DONE
    assert log(fakes) == [*"aaa"]


def test_a_directory_that_is_no_checkout_is_refused_but_for_scratch(fakes, monkeypatch):
    monkeypatch.setattr(full_run, "head", lambda root: None)
    with pytest.raises(SystemExit, match="no git checkout"):
        made(fakes, [job("a")])


def test_a_tree_is_unclean_by_tracked_changes_and_by_new_code_but_not_by_what_a_run_writes(tmp_path):
    for name in ("README.md", "benchmarks/RESULTS.json", "mlx_ttd/a.py", "docs.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("one\n")
    for words in ("init -q", "add .", "-c user.name=a -c user.email=a@b.c commit -qm one"):
        subprocess.run(["git", "-C", str(tmp_path), *words.split()], check=True)
    for name in ("README.md", "benchmarks/RESULTS.json", "notes.txt"):
        (tmp_path / name).write_text("two\n")
    assert unclean(tmp_path) == []
    (tmp_path / "docs.md").write_text("two\n")
    (tmp_path / "mlx_ttd/b.py").write_text("two\n")
    assert unclean(tmp_path) == ["docs.md", "mlx_ttd/b.py"]


def test_a_run_that_is_recorded_has_three_rounds(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--rounds", "2"])
    with pytest.raises(SystemExit):
        command_line.main()
    assert "at least 3 rounds" in capsys.readouterr().err


def test_a_full_run_takes_an_hour_in_parts_of_ten_minutes():
    assert {job.group for job in JOBS} == set(GROUPS)
    default = [job for job in JOBS if job.group not in command_line.ON_REQUEST]
    files = {file for job in default for file in job.files}
    assert 3 * sum(job.minutes for job in default) + sum(file.minutes for file in files) <= 66
    assert max(job.minutes for job in JOBS) <= 9
    assert len({job.name for job in JOBS}) == len(JOBS)


MEASURES_NOTHING_OF_OURS = {"ballast", "bf16_checkpoint", "forecasts", "llama_cpp_peer", "policies", "record"}
MEASURES_NOTHING_OF_OURS |= {"synthetic_store", "__main__"}
MAINS = [path.stem for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()]


@pytest.fixture
def hidden_native(monkeypatch):
    """An install without the native part, on a CPU."""
    from mlx_ttd.kernels import native

    monkeypatch.setattr(native, "_built_for", lambda: "")
    native.extension.cache_clear()
    yield
    native.extension.cache_clear()


@pytest.mark.parametrize("name", sorted(set(MAINS) - MEASURES_NOTHING_OF_OURS))
def test_a_benchmark_refuses_to_time_the_references(name, hidden_native, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"benchmarks/{name}.py"])
    sys.modules.pop(f"benchmarks.{name}", None)
    with pytest.raises(SystemExit, match=r"nothing was measured.*without its native part.*pip install -e \."):
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")


def test_a_full_run_refuses_to_time_the_references(hidden_native, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--work", str(tmp_path), "--scratch"])
    with pytest.raises(SystemExit, match="nothing was measured"):
        command_line.main()
    assert list(tmp_path.iterdir()) == []


def test_a_native_part_for_another_mlx_is_refused_with_its_reason(monkeypatch):
    from mlx_ttd.kernels import native

    monkeypatch.setattr(native, "_built_for", lambda: "0.1.0")
    with pytest.raises(SystemExit, match=r"built for mlx 0\.1\.0"):
        command.require_native()


def test_references_asked_for_by_the_environment_are_refused(monkeypatch):
    monkeypatch.setattr(command, "native_status", lambda: "avx2, 2 threads")
    monkeypatch.setenv("MLX_TTD_BACKEND", "reference")
    with pytest.raises(SystemExit, match="MLX_TTD_BACKEND=reference"):
        command.require_native()


def test_where_the_native_part_serves_a_benchmark_runs(monkeypatch):
    monkeypatch.setattr(command, "native_status", lambda: "avx2, 2 threads")
    ran = []
    command.run(lambda: ran.append(1))
    assert ran == [1]


class Parsed(Exception):
    """A benchmark has taken its arguments."""


COMMANDS = [pytest.param(made, id=made.name) for made in (*JOBS, *{file for job in JOBS for file in job.files})]


@pytest.mark.parametrize("made", COMMANDS)
def test_each_command_of_a_full_run_takes_its_arguments(made, monkeypatch):
    parse = argparse.ArgumentParser.parse_known_args

    def parse_and_stop(self, *given, **named):
        rest = parse(self, *given, **named)[1]
        assert rest == []
        raise Parsed

    names = {"file": "made"} | {file.name: file.name for file in getattr(made, "files", ())}
    arguments = [argument.format_map(names) for argument in made.arguments]
    arguments += ["--json", "out.json"] if isinstance(made, Job) else []
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_and_stop)
    monkeypatch.setattr(command, "require_native", lambda: None)
    monkeypatch.setattr(sys, "argv", [made.module, *arguments])
    sys.modules.pop(made.module, None)
    with pytest.raises(Parsed):
        runpy.run_module(made.module, run_name="__main__")


def test_the_cost_of_the_engine_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["engine", "--rounds", "1", "--tokens", "6", "--json", str(tmp_path / "out.json")])
    engine.main()
    found = json.loads((tmp_path / "out.json").read_text())["results"]
    names = ("round_trip_us", "streamed_us", "direct_us", "cost_us", "of_allowed")
    assert set(found) == {f"engine.{name}" for name in names}
    assert 1 < found["engine.round_trip_us"] < found["engine.direct_us"]


def test_the_engine_benchmark_streams_and_computes_the_same_tokens():
    options = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
    with mlx_ttd.load("demo", "150MB", progress=False) as llm:
        streamed = [chunk.tokens for chunk in llm.stream(engine.PROMPT, **options)]
        assert streamed == [chunk.tokens for chunk in engine.direct(llm, options)]
