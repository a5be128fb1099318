"""Measuring this machine: for stores with and without experts, on the backend that runs, and by what steps."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from checkpoints import DENSE, tiny
from typer.testing import CliRunner

import mlx_ttd
from mlx_ttd import kernels, probe_machine
from mlx_ttd.bench import PROFILED, bench
from mlx_ttd.cli import app
from mlx_ttd.machine import machines
from mlx_ttd.observe import Profile
from mlx_ttd.store import convert, open_store
from mlx_ttd.streaming import disk_rates


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Little is measured, and what a load forces ends with the test."""
    for name, value in {"ROWS": 256, "COLS": 256, "BYTES": 1e6, "STEPS": 4}.items():
        monkeypatch.setattr(probe_machine, name, value)
    with kernels.forced(None):
        yield


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("dense")
    return convert(tiny(folder / "hf", DENSE), folder / "dense.ttd")


def test_the_disk_is_measured_by_the_weights_where_there_are_no_experts(dense) -> None:
    rates, cached, discarded = disk_rates(open_store(dense), depths=(1, 4))
    assert cached > 0
    assert len(rates) + len(discarded) == 2
    assert all(rate > 0 for rate in rates.values())


def test_a_dense_store_is_benched_and_planned_for_this_machine(quick, dense) -> None:
    report = bench(dense, "200MB", tokens=4, prompts=(3,))
    assert report.hit_rate is None
    assert report.forecast.tok_s > 0
    planned = CliRunner().invoke(app, ["plan", str(dense), "--memory", "200MB", "--probe", "--json"])
    assert planned.exit_code == 0, planned.output
    assert json.loads(planned.stdout)["step"].keys() == {"computing", "reading"}


def test_a_probe_runs_on_the_forced_backend_and_leaves_it_forced(quick, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: dict[str, str] = {}
    monkeypatch.setattr(kernels.backend, "used", ran)
    kernels.set_backend("reference")
    probe_machine.probe(open_store(mlx_ttd.demo_path()))
    assert kernels.forced_kind() == "reference"
    assert set(ran.values()) == {"reference"}


def test_only_decode_steps_are_profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[str] = []

    class Watching(Profile):
        def note(self, layer, name, arrays) -> None:
            noted.append(name)
            super().note(layer, name, arrays)

    monkeypatch.setattr("mlx_ttd.bench.probe", lambda store: machines()["m2-8gb"])
    monkeypatch.setattr("mlx_ttd.bench.Profile", Watching)
    bench("demo", "200MB", tokens=4, prompts=(3, 20), slots=6)
    assert noted.count("embedding") == noted.count("logits") == PROFILED
    assert "experts.wave" not in noted
