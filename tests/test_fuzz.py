"""Damaged and made-up files of every kind are read or refused: soon, in bounds, and without running anything."""

from __future__ import annotations

import random

import pytest
from fuzz import TARGETS, check, warm, watching
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


@pytest.fixture(scope="module", params=TARGETS)
def target(request, tmp_path_factory):
    made = TARGETS[request.param](tmp_path_factory.mktemp(request.param))
    warm(made)
    return made


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(rng=st.randoms(use_true_random=False))
def test_hostile_input_is_read_or_refused(target, rng: random.Random) -> None:
    check(target, target.make(rng, target.seeds))


def test_intact_files_are_taken(target):
    assert all(check(target, seed) for seed in target.seeds)


def test_what_a_reader_must_not_do_is_seen(tmp_path):
    import pickle

    with watching() as events:
        (tmp_path / "x").write_text("y")
        pickle.loads(pickle.dumps(pytest.approx))
        eval("1")
    assert [event.split()[0] for event in events] == ["open", "pickle.find_class", "compile", "exec"]
