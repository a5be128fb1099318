"""Offline replay: the known failure of LRU, Belady's bound, and agreement with the provider itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mlx_ttd
from mlx_ttd.observe import Recorder, probing
from mlx_ttd.streaming import policy_names
from mlx_ttd.streaming.replay import belady, replay, reuse_distances, shared_pool, working_set

STEPS = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4).map(np.array), min_size=1, max_size=40)


def test_a_cycle_longer_than_the_cache_gives_lru_no_hits():
    cycle = [np.array([i % 6]) for i in range(60)]
    assert replay(cycle, 6, 5, "lru") == (0, 60)
    hits, _ = belady(cycle, 6, 5)
    assert hits > 40


@given(STEPS, st.integers(4, 10), st.sampled_from(sorted(policy_names())))
def test_no_policy_beats_belady(steps, slots, policy):
    hits, requests = replay(steps, 10, slots, policy)
    best, same = belady(steps, 10, slots)
    assert hits <= best <= requests == same


@given(STEPS)
def test_enough_slots_miss_each_expert_once(steps):
    distinct = len(np.unique(np.concatenate(steps)))
    for policy in policy_names():
        hits, requests = replay(steps, 10, 10, policy)
        assert requests - hits == distinct


@pytest.mark.parametrize("policy", sorted(policy_names()))
def test_the_replay_of_a_recorded_run_counts_what_the_run_counted(policy):
    recorder = Recorder()
    with mlx_ttd.load("demo", "300MB", slots=6, policy=policy) as llm, probing(recorder):
        llm.generate([5], max_tokens=40, ignore_eos=True)
        counters = llm.stats().counters
    layers = [list(np.concatenate(recorder.rows[f"{layer}.router.ids"])) for layer in range(4)]
    found = [replay(steps, 24, 6, policy) for steps in layers]
    assert sum(hits for hits, _ in found) == counters.hits
    assert sum(requests for _, requests in found) == counters.requests
    assert shared_pool(layers, 24, 24, policy)[1] == counters.requests


def test_distances_and_working_sets():
    steps = [np.array(step) for step in ([0], [1], [2], [0], [0])]
    assert reuse_distances(steps).tolist() == [2, 0]
    assert working_set(steps, 3) == pytest.approx((3 + 3 + 2) / 3)
