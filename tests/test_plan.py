"""Forecasts: from headers alone, monotonous where they must be, and the least budgets of the real shapes."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import tiny
from typer.testing import CliRunner

import mlx_ttd
from benchmarks.synthetic_store import plan_store, read_shape
from mlx_ttd import kernels
from mlx_ttd.allocation import divide_budget
from mlx_ttd.bench import bench, sweep
from mlx_ttd.cli import app
from mlx_ttd.errors import BudgetError, CheckpointError, OptionError, StoreError
from mlx_ttd.hit_rate import hit_rate, measured_curve
from mlx_ttd.machine import Machine, machines
from mlx_ttd.options import DEFAULTS_FILE, Options, make_options
from mlx_ttd.plan import Forecast, forecast, plan, step_seconds
from mlx_ttd.spec import model_spec
from mlx_ttd.store import Store, convert, is_hub_id, open_store, store_of_plan
from mlx_ttd.store.checkpoint import Checkpoint
from mlx_ttd.streaming import ALLOCATOR_RESERVE, disk_rates

# The attribute of this name in the package is the function.
PLAN = sys.modules["mlx_ttd.plan"]


def whole_model(head_bits: int) -> Store:
    """The 40-layer 35B as a conversion would make it, from shapes alone."""
    config = read_shape("qwen3.6-35b-a3b")
    made = plan_store(config, head_bits, None, Path("35b"))
    return store_of_plan(Checkpoint(Path("35b"), config, model_spec(config), {}, ""), made)


@pytest.mark.parametrize(("head_bits", "bound"), [(16, 2.7e9), (4, 2.0e9)])
def test_least_budget_of_the_real_model(head_bits: int, bound: float) -> None:
    with pytest.raises(BudgetError) as refused:
        divide_budget(whole_model(head_bits), make_options({}), 4096, 1)
    assert refused.value.least_bytes is not None
    assert refused.value.least_bytes <= bound


def test_a_fixed_bank_keeps_its_room_however_large_the_chunk_could_be() -> None:
    store, options = whole_model(16), make_options({"slots": 256})
    strides = sum(layout.stride for layout in store.layouts if layout is not None)
    with pytest.raises(BudgetError) as refused:
        divide_budget(store, options, 4096, 1)
    assert refused.value.least_bytes is not None
    for spare in (0, 10**7, 10**8, 10**9):
        division = divide_budget(store, options, 4096, refused.value.least_bytes + spare)
        given = division.resident + division.state + division.mark + division.scratch + ALLOCATOR_RESERVE
        assert given + division.slots * strides <= division.total


def test_a_plan_for_a_mac_divides_its_memory_as_a_mac_does(monkeypatch: pytest.MonkeyPatch) -> None:
    here = at(4e9)
    monkeypatch.setattr(kernels, "device_kind", lambda: "metal")
    monkeypatch.setattr(kernels, "chosen", lambda op: "gpu")
    division = divide_budget(whole_model(16), make_options({}), make_options({}).context, int(4e9))
    assert (here.slots, here.least_bytes) == (division.slots, division.least)


def at(memory: float, machine: Machine | None = None, **options) -> Forecast:
    return forecast(whole_model(16), make_options(options), machine or machines()["m2-8gb"], int(memory))


def test_more_memory_buys_slots_hits_and_speed_until_the_page_cache_is_taken() -> None:
    found = [at(memory, read_mode="direct") for memory in (2.9e9, 3.2e9, 4e9, 6e9)]
    for quantity in ("slots", "hit_rate", "tok_s"):
        values = [getattr(one, quantity) for one in found]
        assert values == sorted(set(values))
    assert sum(found[0].step.values()) == pytest.approx(1 / found[0].tok_s)


def test_what_does_not_fit_says_what_would() -> None:
    refused = at(1e9)
    assert not refused.fits
    assert refused.tok_s == 0
    assert f"{refused.least_bytes:,}" in str(refused)
    assert at(refused.least_bytes).fits
    assert not at(refused.least_bytes - 1).fits


def test_a_checkpoint_is_planned_as_its_store_will_be(tmp_path: Path) -> None:
    source = tiny(tmp_path / "source")
    before = plan(source, "200MB", head_bits=4)
    after = plan(convert(source, tmp_path / "store", head_bits=4), "200MB")
    assert before.least_bytes == after.least_bytes
    assert before.step == after.step


def test_every_byte_that_is_not_packed_is_read_at_the_plain_rate(tmp_path: Path) -> None:
    source, machine = tiny(tmp_path / "source"), replace(machines()["m2-8gb"], packed_gb_s=10, plain_gb_s=100)
    for policy in ("int4", "experts-only"):
        store = open_store(convert(source, tmp_path / policy, policy))
        sizes = {name: info.nbytes for name, info in store.resident.items()}
        packed = sum(
            sizes[name + part]
            for name in store.manifest.quantisation
            if name in sizes
            for part in ("", ".scales", ".biases")
        )
        plain = sum(sizes.values()) - packed
        assert (packed > 0) == (policy == "int4")
        dense = step_seconds(store, machine, 8, 1.0, 0.0, 1, 1)["dense"]
        assert dense * 1e9 == pytest.approx(packed / machine.packed_gb_s + plain / machine.plain_gb_s)


def test_a_path_that_is_missing_is_not_looked_for_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: pytest.fail("asked the hub"))
    monkeypatch.chdir(tmp_path)
    for missing in ("stores/model.ttd", "./model", "some where/model"):
        with pytest.raises(StoreError, match="is not a store"):
            plan(missing)
        with pytest.raises(CheckpointError, match="is not a directory"):
            convert(missing, tmp_path / "dst")
    (tmp_path / "some-lab").mkdir()
    (tmp_path / "some-lab" / "model").write_text("")
    assert is_hub_id("some-lab/other")
    assert not is_hub_id("some-lab/model")


def test_the_step_budget_names_the_largest_part() -> None:
    found = plan("demo", wanted_tok_s=1e6)
    assert "largest part is host" in found.advice
    assert "leaves 1000.0 ms" in plan("demo", wanted_tok_s=1).advice
    json.dumps(found.to_json())


def test_given_hit_rates_win() -> None:
    store, machine = whole_model(16), machines()["m2-8gb"]
    found = forecast(store, make_options({"read_mode": "direct"}), machine, 3 * 10**9, curve={8: 0.5, 256: 0.5})
    assert found.hit_rate == 0.5
    assert found.bytes_per_token == pytest.approx(0.5 * 8 * 40 * 1_769_472)


def test_curves_rise_and_stretch() -> None:
    curve = measured_curve(256)
    assert hit_rate(curve, 256) == 1
    assert hit_rate(curve, 13) == pytest.approx((curve[12] + curve[14]) / 2)
    assert hit_rate(measured_curve(512), 32) == pytest.approx(hit_rate(curve, 16))


def test_unknown_machines_and_unknown_disks_are_one_sentence() -> None:
    with pytest.raises(OptionError, match="known are m1-8gb"):
        plan("demo", machine="pdp-11")
    blind = Machine("blind", 8e9, 50, 50, {}, 20, 200, 1000, "probed", {"disk at depth 8": "it was the page cache"})
    with pytest.raises(OptionError, match="it was the page cache"):
        at(3e9, blind, read_mode="direct")


def test_the_disk_is_measured_or_the_figure_discarded_with_its_reason() -> None:
    rates, cached, discarded = disk_rates(open_store(mlx_ttd.demo_path()), depths=(1, 4))
    assert cached > 0
    assert len(rates) + len(discarded) == 2
    assert all(rate > 0 for rate in rates.values())


def test_bench_measures_beside_its_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_ttd.bench.probe", lambda store: machines()["m2-8gb"])
    report = bench("demo", "200MB", tokens=4, prompts=(3, 20), slots=6)
    assert set(report.decode_tok_s) == {3, 20}
    assert report.slots == report.forecast.slots == 6
    assert sum(report.phases.values()) == pytest.approx(1)
    assert f"{report.forecast.tok_s:.2f} forecast" in str(report)
    json.dumps(report.to_json())


def test_a_sweep_tries_every_budget() -> None:
    found = sweep("demo", "100MB", "120MB", points=2)
    assert list(found) == [100_000_000, 120_000_000]
    assert all(rate > 0 for rate in found.values())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"memory": "100GB"}, r"memory is 100.00 GB and .* has 8.00 GB"),
        ({"memory": "1000TB", "machine": "this"}, "this machine has"),
        ({"prompt_tokens": -5}, "prompt_tokens is -5"),
        ({"prompt_tokens": 0}, "prompt_tokens is 0"),
        ({"wanted_tok_s": -5}, "wanted_tok_s is -5"),
        ({"wanted_tok_s": float("nan")}, "wanted_tok_s is nan"),
        ({"prompt_tokens": 10_000}, "plan with context=10000"),
        ({"prompt_tokens": 10**6, "context": 10**6}, "this one reads 32,768"),
        ({"head_bits": 4}, "head_bits is of use with a checkpoint alone"),
    ],
)
def test_what_cannot_be_is_refused(options: dict, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PLAN, "probe", lambda store: pytest.fail("probed"))
    with pytest.raises(OptionError, match=words):
        plan("demo", **options)


def test_the_prompt_is_at_most_the_context() -> None:
    assert plan("demo").prompt_tokens == 512
    assert plan("demo", context=100).prompt_tokens == 100
    assert plan("demo", prompt_tokens=10_000, context=10_000).prompt_tokens == 10_000


def test_the_environment_sets_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_TTD_MEMORY", "150MB")
    assert plan("demo").memory == 150_000_000
    assert plan("demo", "200MB").memory == 200_000_000


@pytest.mark.parametrize("by_environment", [False, True])
def test_this_machine_is_probed_with_the_backend_of_the_options(
    by_environment: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def probed(store: Store) -> Machine:
        seen.append(kernels.forced_kind())
        return replace(machines()["m2-8gb"], source="probed")

    def divided(*arguments, **keywords):
        seen.append(kernels.forced_kind())
        return divide_budget(*arguments, **keywords)

    monkeypatch.setattr(PLAN, "probe", probed)
    monkeypatch.setattr(PLAN, "divide_budget", divided)
    if by_environment:
        monkeypatch.setenv("MLX_TTD_BACKEND", "reference")
    before = kernels.forced_kind()
    plan("demo", "200MB", "this", **({} if by_environment else {"backend": "reference"}))
    assert seen == ["reference", "reference"]
    assert kernels.forced_kind() == before


def test_the_command_forecasts_and_says_when_it_does_not_fit() -> None:
    found = CliRunner().invoke(app, ["plan", "demo", "--memory", "200MB", "--json"])
    assert found.exit_code == 0
    assert json.loads(found.stdout)["fits"]
    refused = CliRunner().invoke(app, ["plan", "demo", "--memory", "10MB"])
    assert refused.exit_code == 1
    assert "does not fit" in refused.stdout


def test_each_measured_default_says_how_it_was_found():
    entries = json.loads(DEFAULTS_FILE.read_text())
    assert entries.keys() == {"depth", "parts", "policy", "prefill_chunk"}
    for name, entry in entries.items():
        assert getattr(Options(), name) == entry["value"]
        assert entry.keys() == {"value", "figure", "command", "date", "machine"}
