"""Guessed reads: only into slots that nothing holds, landed before those are lent, and given up when they cost."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest

import mlx_ttd
from mlx_ttd.observe import Counters
from mlx_ttd.store import open_store
from mlx_ttd.streaming import ExpertProvider, Ledger, ReadPool
from mlx_ttd.streaming.prefetch import Trial
from mlx_ttd.streaming.read_pool import pread_into

STORE = open_store(mlx_ttd.demo_path())
STRIDE, TOP_K = STORE.layouts[0].stride, STORE.spec.top_k
PATH, START, EXPERTS = STORE.expert_file(1)
RECORDS = np.fromfile(PATH, np.uint8, offset=START).reshape(EXPERTS, STRIDE)


@pytest.fixture
def make():
    made = []

    def make(slots, pread=None, total=10**9):
        counters = Counters()
        pool = ReadPool(4, 1, counters, pread)
        made.append(ExpertProvider(STORE, slots, Ledger(total), counters, pool, prefetch="next-layer"))
        return made[-1]

    yield make
    for provider in made:
        provider.close()


def check(provider, ids):
    """Lend `ids` of layer 1 and compare every byte."""
    seen = []
    for lease in provider.arrivals(1, np.array(ids)):
        table, records = np.array(lease.slot_of), np.array(lease.records)
        for expert in lease.experts:
            np.testing.assert_array_equal(records[table[expert]], RECORDS[expert])
            seen.append(int(expert))
        lease.release(())
    assert sorted(seen) == sorted(ids)
    assert not provider.banks[1].pins.any()


def test_what_was_guessed_right_is_a_hit_and_the_rest_is_read(make):
    provider = make(slots=8, total=4 * 8 * STRIDE)
    provider.next_layer.start(1, np.array([[1, 2, 3, 5]]))
    check(provider, [2, 3, 9, 10])
    counts = provider.counters
    assert (counts.prefetched, counts.prefetch_used) == (4, 2)
    assert (counts.hits, counts.misses, counts.records) == (2, 2, 6)
    assert provider.ledger.used == provider.ledger.total


def test_a_lease_keeps_its_slots_from_guesses(make):
    provider = make(slots=TOP_K)
    waves = provider.waves(1, np.arange(TOP_K - 1))
    lease = next(waves)
    provider.next_layer.start(1, np.array([10, 11, 12]))
    assert provider.counters.prefetched == 1
    np.testing.assert_array_equal(np.array(lease.records)[int(np.array(lease.slot_of)[0])], RECORDS[0])
    waves.close()
    check(provider, [10, 11, 12])


def test_a_guess_evicts_no_expert_that_it_guesses_too(make):
    provider = make(slots=TOP_K)
    check(provider, list(range(TOP_K)))
    provider.next_layer.start(1, np.array([0, 1, 2, 20]))
    provider.next_layer.land(1, np.array([20]))
    assert {0, 1, 2, 20} == set(np.flatnonzero(provider.banks[1].slot_of >= 0).tolist())


def test_a_layer_counts_as_resident_only_when_its_guesses_have_landed(make):
    go_on = threading.Event()

    def pread(fd, offset, into):
        assert go_on.wait(10)
        return pread_into(fd, offset, into)

    provider = make(slots=EXPERTS, pread=pread)
    provider.next_layer.start(1, np.arange(EXPERTS))
    assert provider.whole(1) is None
    go_on.set()
    check(provider, [0, EXPERTS - 1])
    assert provider.whole(1) is not None


@pytest.mark.parametrize("then", ["resize", "clear", "close"])
def test_reads_in_flight_end_before_their_slots_go(make, then):
    provider = make(slots=8)
    provider.next_layer.start(1, np.arange(8))
    {"resize": lambda: provider.resize(TOP_K), "clear": provider.clear, "close": provider.close}[then]()
    assert not provider.next_layer.flying(1)
    if then != "close":
        check(provider, [3, 4, 5])


def test_a_guess_that_cannot_be_read_is_forgotten(make):
    broken = [True]

    def pread(fd, offset, into):
        if broken[0]:
            raise OSError(5, "Input/output error")
        return pread_into(fd, offset, into)

    provider = make(slots=8, pread=pread)
    provider.next_layer.start(1, np.array([1, 2]))
    provider.next_layer.land(1, np.array([1, 2]))
    assert (provider.banks[1].slot_of == -1).all()
    broken[0] = False
    check(provider, [1, 2])


def steps(trial, counters, count, wait):
    """`count` steps of three layers, each of which waits `wait` seconds; prefill waits between steps do not count."""
    answers = []
    for _ in range(count):
        for layer in range(3):
            answers.append(trial.due(layer))
            counters.wait_seconds += wait
        counters.wait_seconds += 100.0
    return answers


def test_guessing_begins_after_a_measured_window_and_ends_when_reads_are_waited_for_longer():
    counters = SimpleNamespace(wait_seconds=0.0)
    trial = Trial(counters, window=4)
    assert not any(steps(trial, counters, 8, 1.0))
    assert all(steps(trial, counters, 4, 0.9))
    assert all(steps(trial, counters, 4, 0.9))
    steps(trial, counters, 5, 1.2)
    assert not any(steps(trial, counters, 100, 0.1))


def test_counts_that_start_anew_are_no_wait():
    counters = SimpleNamespace(wait_seconds=0.0)
    trial = Trial(counters, window=4)
    steps(trial, counters, 9, 1.0)
    counters.wait_seconds = 0.0
    assert all(steps(trial, counters, 12, 0.9))


def test_a_run_guesses_and_says_how_well():
    with mlx_ttd.load("demo", "400MB", slots=8, prefetch="next-layer") as llm:
        trial = llm.provider.next_layer.trial = Trial(llm.counters, window=1)
        trial.due, due = (lambda layer: due(layer) or True), trial.due
        llm.generate([5, 6, 7], max_tokens=20, ignore_eos=True)
        counts = llm.stats().counters
        assert 0 < counts.prefetch_used <= counts.prefetched
        # One wait for the device a layer and one for the logits, guesses or not.
        assert counts.host_syncs <= counts.decode_steps * (len(llm.store.spec.layer_types) + 1) + 4
