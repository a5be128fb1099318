"""RESULTS.json holds medians of rounds and the code that made them, and README.md quotes those and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from documents import ROOT, figures

from benchmarks import forecasts
from benchmarks.commits import GPU_CODE, changed_since, head
from benchmarks.jobs import JOBS
from benchmarks.quotes import Quote, quotes, requoted, without_quotes
from benchmarks.record import entry_of, on_gpu, read, record, summary

README = (ROOT / "README.md").read_text()
KEYS = {"machine", "noisy", "results", "date", "commit", "commands"}


def wrong(text: str, results: dict[str, Any]) -> list[Quote]:
    return [quote for quote in quotes(text) if quote.written != quote.right(results)]


def test_each_figure_that_the_readme_quotes_is_the_median_or_the_rounds():
    assert len(quotes(README)) > 5
    assert wrong(README, read()) == []


def test_each_quoted_benchmark_states_its_rounds_in_the_same_paragraph():
    results = read()
    for paragraph in README.split("\n\n"):
        stated: dict[str, set[int]] = {}
        for quote in quotes(paragraph):
            stated.setdefault(quote.benchmark, set()).add(results[quote.benchmark]["results"][quote.name]["rounds"])
        assert set(stated) == {quote.benchmark for quote in quotes(paragraph) if quote.rounds}, paragraph
        assert [name for name, rounds in stated.items() if len(rounds) > 1] == [], paragraph


def test_the_readme_states_no_other_figure():
    text = without_quotes(README.replace("\n".join(forecasts.table()), ""))
    assert text != README
    assert figures(text) == []


def test_the_readme_quotes_no_row_that_is_older():
    assert [quote for quote in quotes(README) if read()[quote.benchmark].get("older")] == []


RESULTS = {"a": {"results": {"b.c": {"median": 0.1249, "least": 0.1, "greatest": 1234.5, "rounds": 3}}}}


@pytest.mark.parametrize(
    ("written", "right"),
    [
        ("0.1<!-- a/b.c -->", "0.1<!-- a/b.c -->"),
        ("of 0.13<!-- a/b.c --> x", "of 0.12<!-- a/b.c --> x"),
        ("13%<!-- a/b.c -->", "12%<!-- a/b.c -->"),
        ("1<!-- a/b.c rounds --> rounds", "3<!-- a/b.c rounds --> rounds"),
        ("1,234.5<!-- a/b.c -->", "0.1<!-- a/b.c -->"),
        ("2 and 2<!-- a/b.c -->", "2 and 0<!-- a/b.c -->"),
    ],
)
def test_a_quoted_figure_that_is_not_the_median_is_found_and_put_right(written, right):
    assert bool(wrong(written, RESULTS)) == (written != right)
    assert requoted(written, RESULTS) == right
    assert wrong(right, RESULTS) == []


def test_a_quote_of_a_figure_that_there_is_not_is_an_error():
    with pytest.raises(KeyError):
        wrong("1<!-- a/b.d -->", RESULTS)


def test_each_result_names_the_commands_that_made_it_and_how_often_they_ran():
    for name, entry in read().items():
        assert set(entry) == KEYS | ({"older"} if on_gpu(entry) else set()), name
        for command in entry["commands"]:
            assert (ROOT / f"{command.split()[2].replace('.', '/')}.py").is_file(), command
        for figure in entry["results"].values():
            assert set(figure) == {"median", "least", "greatest", "rounds"}
            assert figure["least"] <= figure["median"] <= figure["greatest"]
            assert figure["rounds"] >= 1


def test_each_result_of_a_cpu_is_part_of_the_full_run():
    assert {name for name, entry in read().items() if not on_gpu(entry)} <= {job.benchmark for job in JOBS}


def test_each_result_of_a_gpu_is_marked_older_if_its_code_has_changed():
    for name, entry in read().items():
        if on_gpu(entry):
            changed = changed_since(entry["commit"], GPU_CODE)
            if changed is None:
                pytest.skip("needs this repository's history")
            assert entry["older"] == changed, f"{name}: run `python -m benchmarks --quote`"


def test_the_code_of_gpu_rows_is_where_it_is_said_to_be():
    assert [path for path in GPU_CODE if not (ROOT / path).is_dir()] == []


def test_a_figure_is_the_median_of_its_rounds_with_their_bounds():
    rounds = [{"machine": {"cores": 2}, "noisy": n == 1, "results": {"x": float(x)}} for n, x in enumerate((5, 1, 2))]
    entry = entry_of(rounds, "abc", ["python -m benchmarks.a"])
    assert entry["results"] == {"x": {"median": 2.0, "least": 1.0, "greatest": 5.0, "rounds": 3}}
    assert (entry["noisy"], entry["commit"], entry["machine"]) == (True, "abc", {"cores": 2})


def test_rounds_of_different_machines_make_no_median():
    rounds = [{"machine": {"cores": cores}, "results": {"x": 1.0}} for cores in (2, 4)]
    with pytest.raises(ValueError, match="different machines"):
        entry_of(rounds, "abc", [])


@pytest.mark.parametrize("values", [[], [1.0, float("nan")], [float("inf")]])
def test_what_is_no_number_is_no_figure(values):
    with pytest.raises(ValueError, match="no figures"):
        summary(values)


def test_recording_keeps_other_benchmarks(tmp_path: Path):
    path = tmp_path / "RESULTS.json"
    for name, value in (("a", 1.0), ("b", 2.0), ("a", 3.0)):
        record({name: entry_of([{"machine": {}, "results": {"x": value}}], "abc", [])}, path)
    kept = json.loads(path.read_text())
    assert [kept[name]["results"]["x"]["median"] for name in ("a", "b")] == [3.0, 2.0]


def repository(path: Path) -> Path:
    """A checkout of one commit, with code for GPUs."""
    (path / "csrc/kernels").mkdir(parents=True)
    (path / "csrc/kernels/one.metal").write_text("one\n")
    (path / "benchmarks").mkdir()
    (path / "benchmarks/RESULTS.json").write_text("{}\n")
    (path / "README.md").write_text("read\n")
    for command in ("init -q", "add .", "-c user.name=a -c user.email=a@b.c commit -qm one"):
        subprocess.run(["git", "-C", str(path), *command.split()], check=True)
    return path


def test_a_row_of_a_gpu_becomes_older_when_its_code_changes(tmp_path: Path):
    root = repository(tmp_path)
    commit, path = head(root), root / "benchmarks/RESULTS.json"
    entry = entry_of([{"machine": {"device": "a GPU"}, "results": {"x": 1.0}}], commit, [])
    assert record({"gpu": entry}, path, root)["gpu"]["older"] is False
    (root / "README.md").write_text("more\n")
    assert record({}, path, root)["gpu"]["older"] is False
    (root / "csrc/kernels/one.metal").write_text("two\n")
    assert record({}, path, root)["gpu"]["older"] is True


@pytest.mark.parametrize("commit", ["0123456", "{head}+", None])
def test_a_row_of_code_that_is_not_known_is_older(tmp_path: Path, commit: str | None):
    root = repository(tmp_path)
    commit = commit and commit.format(head=head(root))
    entry = entry_of([{"machine": {"gpu": "a GPU"}, "results": {"x": 1.0}}], commit, [])
    assert record({"gpu": entry}, root / "benchmarks/RESULTS.json", root)["gpu"]["older"] is True


def test_rounds_of_a_gpu_without_a_known_commit_are_not_recorded(tmp_path: Path):
    found = tmp_path / "found.json"
    found.write_text(json.dumps({"machine": {}, "results": {"x": 1.0}, "commit": "abc+"}))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.record", "gpu_model", str(found)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "one known commit" in done.stderr
    assert "Traceback" not in done.stderr
