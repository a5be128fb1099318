"""The alternating runner: figures an arm, and no ratio between runs that gave different bits."""

from __future__ import annotations

import dataclasses
import json

import pytest

import mlx_ttd
from mlx_ttd.errors import OptionError, TTDError
from mlx_ttd.observe import machine_state


@pytest.fixture(scope="module")
def comparison():
    arms = {"few": {"slots": 5}, "all": {"slots": 24}}
    return mlx_ttd.compare("demo", arms, "In the beginning", max_tokens=6, rounds=2, memory="300MB")


def test_arms_are_measured(comparison):
    few, everything = comparison.arms["few"], comparison.arms["all"]
    assert len(few.decode_rates) == len(few.first_token_seconds) == 2
    assert few.bytes_per_token > everything.bytes_per_token > 0
    assert few.hit_rate < everything.hit_rate
    assert few.step_seconds_p50 <= few.step_seconds_p95
    assert comparison.ratio("few", "all") == pytest.approx(few.decode_rate / everything.decode_rate)


def test_the_json_has_a_schema_and_units(comparison):
    data = json.loads(json.dumps(comparison.to_json()))
    assert data["schema"] == 1
    assert data["units"]["rates"] == "tokens/s"
    assert set(data["arms"]) == {"few", "all"}
    assert data["before"]["free_disk_bytes"] > 0


def test_different_bits_have_no_ratio(comparison):
    other = dataclasses.replace(comparison.arms["few"], logits_digest="0" * 64)
    changed = dataclasses.replace(comparison, arms={**comparison.arms, "few": other})
    with pytest.raises(TTDError, match="same tokens and logits"):
        changed.ratio("few", "all")


def test_a_busy_or_swapping_machine_is_noisy(comparison):
    calm = dataclasses.replace(machine_state(), load=0.0)
    steady = {n: dataclasses.replace(a, decode_rates=(10.0, 10.0)) for n, a in comparison.arms.items()}
    quiet = dataclasses.replace(comparison, arms=steady, before=calm, after=calm)
    assert not quiet.noisy
    assert dataclasses.replace(quiet, before=dataclasses.replace(calm, load=99.0)).noisy
    assert dataclasses.replace(quiet, after=dataclasses.replace(calm, page_outs=calm.page_outs + 1)).noisy
    uneven = {**steady, "few": dataclasses.replace(steady["few"], decode_rates=(5.0, 10.0))}
    assert dataclasses.replace(quiet, arms=uneven).noisy


def test_a_warm_arm_reads_less(comparison):
    warm = mlx_ttd.compare(
        "demo", {"warm": {"slots": 24}}, "In the beginning", max_tokens=6, rounds=1, warm=True, memory="300MB"
    )
    assert warm.arms["warm"].bytes_per_token < comparison.arms["all"].bytes_per_token


def test_too_little_to_compare_is_refused():
    with pytest.raises(OptionError):
        mlx_ttd.compare("demo", {}, "And", memory="300MB")
