"""The budget is a hard bound: 4 layers of the real shapes never take more memory than was allowed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import mlx_ttd
from benchmarks.peak_memory import over_budget
from benchmarks.synthetic_store import write_store
from mlx_ttd.store_paths import demo_path

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="not run: reads /proc")]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store("qwen3.6-35b-a3b", tmp_path_factory.mktemp("peak") / "store", layers=4)


@pytest.mark.parametrize("times", [1, 2])
def test_peak_stays_within_the_budget(store: Path, times: int) -> None:
    found = over_budget(store, times * mlx_ttd.info(store)["least_bytes"], prompts=10)
    assert found["over"] <= 0, found


def test_a_thousand_generations_leave_nothing_behind() -> None:
    budget = 2 * mlx_ttd.info("demo")["least_bytes"]
    # An allocator takes some seven hundred to settle.
    found = over_budget(demo_path(), budget, prompts=1500, longest=40)
    assert found["live"] < 100, found
    assert found["growth"] < 500, found
    assert found["over"] <= 0, found
