"""The doctor's block names what a bug report needs, and two backends installed together are called a problem."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from mlx_ttd.observe import doctor


@pytest.fixture
def installed(monkeypatch):
    versions: dict[str, str] = {}

    def version(name: str) -> str:
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(doctor, "version", version)
    return versions


def test_one_backend_of_the_same_version_is_sound(installed):
    installed.update({"mlx": "0.32.4", "mlx-cuda-13": "0.32.4"})
    assert doctor.backends_installed() == {"mlx-cuda-13": "0.32.4"}
    assert doctor.problems() == []


def test_two_backends_are_a_problem_with_its_remedy(installed):
    installed.update({"mlx": "0.32.4", "mlx-cpu": "0.32.4", "mlx-cuda-13": "0.32.4"})
    (problem,) = doctor.problems()
    assert "mlx-cpu and mlx-cuda-13" in problem
    assert "pip uninstall -y mlx-cpu mlx-cuda-13" in problem
    assert "mlx-cuda-13==0.32.4" in problem


def test_a_backend_of_another_version_is_a_problem(installed):
    installed.update({"mlx": "0.32.4", "mlx-cpu": "0.32.3"})
    (problem,) = doctor.problems()
    assert "mlx-cpu is 0.32.3 but mlx is 0.32.4" in problem


def test_this_installation_has_one_backend():
    assert len(doctor.backends_installed()) == 1
    assert doctor.problems() == []


def test_report_names_every_fact(monkeypatch, tmp_path):
    monkeypatch.setenv("MLX_TTD_MEMORY", "3GB")
    block = doctor.report(memory=(8_000_000_000, 2_500_000_000), native="absent", folder=tmp_path)
    facts = dict(line.split(":", 1) for line in block.splitlines())
    assert list(facts) == [
        "mlx_ttd",
        "mlx",
        "device",
        "native part",
        "python",
        "system",
        "processor",
        "instructions",
        "memory",
        "disk",
        "libraries",
        "environment",
    ]
    assert facts["memory"].strip() == "8.0 GB, 2.5 GB free"
    assert facts["native part"].strip() == "absent"
    assert "MLX_TTD_MEMORY=3GB" in facts["environment"]
    assert all(fact.strip() for fact in facts.values())
    assert "missing" not in facts["libraries"]
