"""Leases, slots and reads: what is lent is never overwritten too early, and nothing is read twice in vain."""

from __future__ import annotations

import itertools
import os
import shutil
import threading

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlx_ttd
from mlx_ttd.allocation import divide_budget
from mlx_ttd.errors import BudgetError, LeaseError, OptionError, RecordError
from mlx_ttd.observe import Counters
from mlx_ttd.options import make_options
from mlx_ttd.spec import STRIDE_UNIT
from mlx_ttd.store import open_store
from mlx_ttd.streaming import ExpertProvider, Ledger, ReadPool, policy_names
from mlx_ttd.streaming.policies import make_policy
from mlx_ttd.streaming.read_pool import pread_into
from mlx_ttd.streaming.slots import SlotBank

pytestmark = pytest.mark.usefixtures("nothing_left_by_others")
STORE = open_store(mlx_ttd.demo_path())
STRIDE = STORE.layouts[0].stride
EXPERTS, TOP_K = STORE.spec.experts, STORE.spec.top_k
RECORDS = [
    np.fromfile(STORE.expert_file(layer)[0], np.uint8, offset=STORE.expert_file(layer)[1]).reshape(EXPERTS, STRIDE)
    for layer in range(4)
]


def make_provider(
    slots=6,
    policy="lfu",
    store=STORE,
    pread=None,
    depth=4,
    parts=1,
    verify="first-read",
    total=10**9,
    read_mode="cached",
):
    counters = Counters()
    pool = ReadPool(depth, parts, counters, pread)
    return ExpertProvider(store, slots, Ledger(total), counters, pool, policy, verify, read_mode)


def held(lease, expert):
    return np.array(lease.records)[int(np.array(lease.slot_of)[expert])]


@pytest.fixture
def damaged(tmp_path):
    """A copy of the demo store that may be damaged."""
    shutil.copytree(mlx_ttd.demo_path(), tmp_path / "store")
    return tmp_path / "store"


@settings(max_examples=60)
@given(
    calls=st.lists(
        st.tuples(st.integers(0, 3), st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=EXPERTS)), max_size=12
    ),
    slots=st.integers(TOP_K, EXPERTS),
    policy=st.sampled_from(sorted(policy_names())),
    parts=st.integers(1, 3),
)
def test_leases_hold_what_was_asked_within_the_budget(calls, slots, policy, parts):
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    bound = 4 * (slots * STRIDE + 16_384) + 4096 * (len(calls) + 4)
    provider = make_provider(slots, policy, parts=parts, total=4 * slots * STRIDE)
    try:
        assert provider.ledger.used <= provider.ledger.total
        for layer, ids in calls:
            seen = []
            for lease in provider.waves(layer, np.array(ids)):
                table = np.array(lease.slot_of)
                group = np.flatnonzero(table >= 0)
                assert len(set(table[group])) == len(group) <= slots
                for expert in group:
                    np.testing.assert_array_equal(held(lease, expert), RECORDS[layer][expert])
                seen += group.tolist()
                assert mx.get_active_memory() - before <= bound
                lease.release(())
            assert seen == sorted(set(ids))
        counters = provider.counters
        assert counters.requests == sum(len(set(ids)) for _, ids in calls) == counters.hits + counters.misses
        assert counters.records == counters.misses
        assert counters.bytes_read == counters.misses * STRIDE
    finally:
        provider.close()
    assert provider.ledger.used == 0


@pytest.mark.slow
def test_a_bank_of_more_than_two_gib_is_one_buffer():
    bank = SlotBank(200, 140, 1000 * STRIDE_UNIT, make_policy("lfu", 200))
    bank.slot_of[7] = 139
    bank.row(7)[-1] = 9
    assert bank.records.shape == (140, 1000 * STRIDE_UNIT)
    assert bank.records[139, -1].item() == 9


def test_arrays_that_cannot_be_evaluated_keep_their_slots(monkeypatch):
    bank = SlotBank(8, 4, STRIDE_UNIT, make_policy("lfu", 8))
    slots = np.array([1])
    bank.pins[slots] += 1
    bank.unpin(slots, [mx.zeros(1)])
    monkeypatch.setattr(mx, "eval", lambda *arrays: (_ for _ in ()).throw(RuntimeError("no stream")))
    with pytest.raises(RuntimeError):
        bank.settle()
    monkeypatch.undo()
    assert bank._held[1] == 1
    bank.settle()
    assert bank._held[1] == 0


def test_a_released_lease_keeps_its_slots_until_its_arrays_are_evaluated():
    provider = make_provider(slots=TOP_K)
    for lease in provider.waves(0, np.arange(TOP_K)):
        late = lease.records[lease.slot_of[mx.arange(TOP_K)]].sum(axis=1)
        lease.release([late])
    (other,) = provider.waves(0, np.arange(TOP_K, 2 * TOP_K))
    np.testing.assert_array_equal(held(other, TOP_K), RECORDS[0][TOP_K])
    np.testing.assert_array_equal(np.array(late), RECORDS[0][:TOP_K].sum(axis=1, dtype=np.uint32))
    provider.close()


def test_a_lease_that_is_left_unreleased_evaluates_its_outputs():
    provider = make_provider(slots=TOP_K)
    for lease in provider.waves(0, np.arange(TOP_K)):
        late = lease.records[lease.slot_of[mx.arange(TOP_K)]].sum(axis=1)
        lease.outputs.append(late)
    for lease in provider.waves(0, np.arange(TOP_K, 2 * TOP_K)):
        lease.release(())
    np.testing.assert_array_equal(np.array(late), RECORDS[0][:TOP_K].sum(axis=1, dtype=np.uint32))
    provider.close()


def test_slots_of_an_open_lease_are_not_taken():
    provider = make_provider(slots=TOP_K)
    waves = provider.waves(0, np.arange(TOP_K))
    lease = next(waves)
    with pytest.raises(LeaseError, match="release"):
        next(provider.waves(0, np.array([TOP_K])))
    np.testing.assert_array_equal(held(lease, 0), RECORDS[0][0])
    waves.close()
    next(provider.waves(0, np.array([TOP_K])))
    provider.close()


def test_each_expert_is_read_at_most_once_in_a_call_that_exceeds_the_slots():
    provider = make_provider(slots=5)
    for lease in provider.waves(1, np.arange(EXPERTS)):
        lease.release(())
    assert provider.counters.records == EXPERTS
    # The ones that stayed are found again, and the others are read once more.
    for lease in provider.waves(1, np.arange(EXPERTS)):
        lease.release(())
    assert provider.counters.hits > 0
    assert provider.counters.records + provider.counters.hits == 2 * EXPERTS
    provider.close()


def test_a_fully_resident_layer_needs_no_read_back_and_counts_later():
    provider = make_provider(slots=EXPERTS)
    assert provider.resident(0, mx.array([[1, 2]])) is None
    for lease in provider.waves(0, np.arange(EXPERTS)):
        lease.release(())
    lease = provider.resident(0, mx.array([[1, 2, 2]]))
    np.testing.assert_array_equal(held(lease, 2), RECORDS[0][2])
    provider.settle()
    assert provider.counters.hits == 2
    provider.close()


def test_resizing_empties_the_banks_and_moves_the_ledger():
    provider = make_provider(slots=EXPERTS)
    for lease in provider.waves(0, np.arange(EXPERTS)):
        lease.release(())
    provider.resize(TOP_K)
    assert provider.ledger.used == 4 * TOP_K * STRIDE
    (lease,) = provider.waves(0, np.arange(2))
    np.testing.assert_array_equal(held(lease, 1), RECORDS[0][1])
    provider.close()


def test_too_few_slots_or_bytes_are_refused():
    too_few = rf"^slots={TOP_K - 1} cannot hold .* at least slots={TOP_K}, or 0"
    with pytest.raises(OptionError, match=too_few):
        make_provider(slots=TOP_K - 1)
    with pytest.raises(OptionError, match=too_few):
        mlx_ttd.load("demo", "300MB", slots=TOP_K - 1)
    with pytest.raises(OptionError, match=too_few):
        mlx_ttd.plan("demo", "300MB", slots=TOP_K - 1)
    with pytest.raises(BudgetError, match="left"):
        make_provider(slots=EXPERTS, total=1000)


def test_more_slots_than_experts_cost_what_all_experts_cost():
    all_of_them, more = (divide_budget(STORE, make_options({"slots": n}), 4096, 3 * 10**8) for n in (EXPERTS, 4096))
    assert more == all_of_them
    assert more.slots == EXPERTS


def test_what_comes_before_a_call_comes_once_while_nothing_is_lent_and_may_resize():
    provider = make_provider(slots=8)
    for lease in provider.waves(0, np.arange(4)):
        lease.release(())
    sizes, lent = [6, 4, 8], []

    def before_call():
        lent.append(provider.lent)
        provider.resize(sizes[len(lent) - 1])

    provider.before_call = before_call
    for calls, ids in enumerate(([0, 1, 8, 9], [0, 1, 2, 3, 4], [0, 1, 2, 3]), 1):
        seen = []
        for lease in provider.arrivals(0, np.array(ids)):
            for expert in lease.experts:
                np.testing.assert_array_equal(held(lease, expert), RECORDS[0][expert])
            seen += lease.experts.tolist()
            lease.release(())
        assert sorted(seen) == ids
        assert provider.slots == sizes[calls - 1]
        assert lent == [False] * calls
    provider.close()


class Faults:
    """A pread that misbehaves on the calls it is told to."""

    def __init__(self, fault, calls):
        self.fault, self.calls, self.count = fault, calls, itertools.count()

    def __call__(self, fd, offset, into):
        if next(self.count) not in self.calls:
            return pread_into(fd, offset, into)
        if self.fault == "error":
            raise OSError(5, "Input/output error")
        got = pread_into(fd, offset, into)
        if self.fault == "short":
            return got // 2
        into[7] ^= 1
        return got


@pytest.mark.parametrize("fault", ["error", "short", "flip"])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_read_that_fails_once_is_repeated(fault, parts):
    provider = make_provider(pread=Faults(fault, {1}), parts=parts, verify="always", depth=1)
    for lease in provider.waves(0, np.arange(TOP_K)):
        for expert in range(TOP_K):
            np.testing.assert_array_equal(held(lease, expert), RECORDS[0][expert])
        lease.release(())
    assert provider.counters.records == TOP_K
    provider.close()


@pytest.mark.parametrize("fault", ["error", "short", "flip"])
def test_a_read_that_keeps_failing_names_the_record_and_leaves_no_half_slot(fault):
    faults = Faults(fault, set(range(10_000)))
    provider = make_provider(pread=faults, verify="always")
    with pytest.raises(RecordError, match=r"layer-002.safetensors.*layer 2, expert \d"):
        next(provider.waves(2, np.arange(TOP_K)))
    faults.calls = set()
    for lease in provider.waves(2, np.arange(TOP_K)):
        for expert in range(TOP_K):
            np.testing.assert_array_equal(held(lease, expert), RECORDS[2][expert])
        lease.release(())
    provider.close()


def test_a_flipped_bit_on_disk_is_named(damaged):
    path, start, _ = open_store(damaged).expert_file(1)
    with open(path, "r+b") as file:
        file.seek(start + 3 * STRIDE + 100)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 16]))
    provider = make_provider(store=open_store(damaged))
    with pytest.raises(RecordError, match="layer 1, expert 3"):
        next(provider.waves(1, np.arange(TOP_K)))
    provider.close()


def test_a_file_that_shrinks_or_goes_under_a_running_model_is_named(damaged):
    provider = make_provider(store=open_store(damaged))
    path, start, _ = provider.store.expert_file(0)
    os.truncate(path, start + STRIDE + 5)
    with pytest.raises(RecordError, match="short"):
        next(provider.waves(0, np.array([1])))
    next(provider.waves(0, np.array([0])))
    provider.store.expert_file(3)[0].unlink()
    with pytest.raises(RecordError, match="layer-003"):
        next(provider.waves(3, np.array([0])))
    provider.close()


def test_an_interrupted_call_leaves_no_slot_pinned():
    provider = make_provider(slots=5)
    waves = provider.waves(0, np.arange(EXPERTS))
    next(waves)
    waves.close()
    assert not provider.banks[0].pins.any()
    for lease in provider.waves(0, np.arange(EXPERTS)):
        lease.release(())
    provider.close()


def test_reads_do_not_wait_for_slots_one_by_one():
    active, most, lock = 0, 0, threading.Lock()
    ready = threading.Barrier(TOP_K)

    def pread(fd, offset, into):
        nonlocal active, most
        with lock:
            active += 1
            most = max(most, active)
        ready.wait(10)
        with lock:
            active -= 1
        return pread_into(fd, offset, into)

    provider = make_provider(slots=TOP_K, pread=pread, depth=16)
    next(provider.waves(0, np.arange(TOP_K)))
    assert most == TOP_K
    provider.close()


def test_experts_are_lent_as_they_arrive():
    reading, go_on, last = threading.Event(), threading.Event(), threading.Event()

    def pread(fd, offset, into):
        reading.set()
        assert go_on.wait(10)
        assert offset < first_of_nine or last.wait(10)
        return pread_into(fd, offset, into)

    first_of_nine = STORE.expert_file(0)[1] + 9 * STORE.layouts[0].stride

    provider = make_provider(slots=6, pread=pread)
    go_on.set()
    for lease in provider.waves(0, np.array([1, 3])):
        lease.release(())
    go_on.clear()
    reading.clear()
    leases = provider.arrivals(0, np.array([[0, 1, 3, 9]]))
    first = next(leases)
    assert first.experts.tolist() == [1, 3]
    np.testing.assert_array_equal(held(first, 3), RECORDS[0][3])
    assert reading.wait(10)
    go_on.set()
    second = next(leases)
    assert second.experts.tolist() == [0]
    np.testing.assert_array_equal(held(second, 0), RECORDS[0][0])
    last.set()
    third = next(leases)
    assert third.experts.tolist() == [9]
    np.testing.assert_array_equal(held(third, 9), RECORDS[0][9])
    assert list(leases) == []
    assert not provider.banks[0].pins.any()
    assert (provider.counters.hits, provider.counters.misses) == (2, 4)
    provider.close()


def test_a_failed_arrival_leaves_nothing_pinned():
    faults = Faults("error", set())
    provider = make_provider(slots=6, pread=faults)
    for lease in provider.waves(0, np.array([1, 3])):
        lease.release(())
    faults.calls = set(range(1000))
    leases = provider.arrivals(0, np.array([0, 1, 3, 9]))
    next(leases)
    with pytest.raises(RecordError):
        next(leases)
    assert not provider.banks[0].pins.any()
    # A lease that is out when the reader goes away, and what was still to come, are given back.
    faults.calls = set()
    leases = provider.arrivals(0, np.array([0, 1, 3, 9]))
    next(leases)
    leases.close()
    assert not provider.banks[0].pins.any()
    faults.calls = set()
    for lease in provider.arrivals(0, np.array([0, 1, 3, 9])):
        for expert in lease.experts:
            np.testing.assert_array_equal(held(lease, expert), RECORDS[0][expert])
    provider.close()


def test_direct_reads_give_the_same_bytes():
    provider = make_provider(read_mode="direct", parts=2)
    for lease in provider.waves(2, np.arange(EXPERTS)):
        for expert in lease.experts:
            np.testing.assert_array_equal(held(lease, expert), RECORDS[2][expert])
        lease.release(())
    provider.close()


def test_policies_evict_as_they_say():
    def kept(name, uses):
        policy, resident = make_policy(name, 4), set()
        for expert in uses:
            policy.used(np.array([expert]))
            if expert not in resident:
                if len(resident) == 2:
                    resident -= set(policy.victims(np.array(sorted(resident)), 1).tolist())
                policy.inserted(np.array([expert]))
                resident.add(expert)
        return resident

    assert kept("lru", [0, 1, 0, 2]) == {0, 2}
    assert kept("fifo", [0, 1, 0, 2]) == {1, 2}
    assert kept("lfu", [0, 0, 0, 1, 2]) == {0, 2}
    # With ageing, old fame fades.
    assert kept("lfu", [0, 0, *[1] * 200, 2]) == {1, 2}
    with pytest.raises(OptionError, match="fifo, lfu, lru"):
        make_policy("best", 4)
