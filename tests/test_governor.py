"""What a run does when the machine gets short of memory, swap or disk: give slots back, end, and change no bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import mlx_ttd
from mlx_ttd.errors import PressureError
from mlx_ttd.observe import Counters
from mlx_ttd.streaming import Governor, machine_reading
from mlx_ttd.streaming.governor import Limits, Reading

CALM = Reading(memory=8 * 10**9, swap=3 * 10**9, disk=50 * 10**9)
SHORT = replace(CALM, memory=9 * 10**7)
GONE = replace(CALM, memory=10**7)
PROMPT = list(range(2, 300))


class Machine:
    """Readings in turn, the last for ever, each taking `cost` seconds of its own clock."""

    def __init__(self, *readings, cost=0.0):
        self.readings, self.cost, self.now, self.looks = list(readings), cost, 0.0, 0

    def read(self):
        self.looks += 1
        self.now += self.cost
        return self.readings.pop(0) if len(self.readings) > 1 else self.readings[0]

    def clock(self):
        return self.now

    def pass_time(self, seconds):
        self.now += seconds


def governor(machine, provider=None):
    return Governor(machine.read, provider, Counters(), clock=machine.clock)


def govern(llm, machine):
    """Let `machine` stand in for this one, looked at before every call of the provider and every step."""
    llm._core.governor._read, llm._core.governor._limits = machine.read, Limits(seconds=0.0, share=1e9)


def generate(llm):
    return llm.generate(PROMPT, max_tokens=24, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def calm():
    with mlx_ttd.load("demo", "400MB", slots=24) as llm:
        return generate(llm)


@pytest.mark.parametrize("when", [0, 1, 3, 30])
def test_a_shrink_at_any_time_changes_no_bit(when, calm):
    with mlx_ttd.load("demo", "400MB", slots=16) as llm:
        held = llm.ledger.accounts["slots"]
        govern(llm, Machine(*[CALM] * when, SHORT, CALM))
        response = generate(llm)
        assert (response.digest, response.logits_digest) == (calm.digest, calm.logits_digest)
        assert llm.provider.slots == llm.stats().division.slots == 8
        assert llm.ledger.accounts["slots"] == held // 2
        assert llm.stats().counters.shrinks == 1
        llm.set_memory("400MB")
        assert llm.provider.slots == 16


def test_a_loop_of_another_program_is_governed_in_every_layer_of_a_step(calm):
    with mlx_ttd.load("demo", "400MB", slots=8) as llm:
        machine = Machine(CALM)
        govern(llm, machine)
        cache, token, tokens = llm.model.make_cache(), PROMPT[-1], []
        llm.model(mx.array([PROMPT[:-1]]), cache=cache)
        for step in range(len(calm.tokens)):
            machine.readings = [SHORT, CALM] if step == 9 else [CALM]
            looks = machine.looks
            token = llm.model(mx.array([[token]]), cache=cache)[0, -1].argmax().item()
            tokens.append(token)
            assert machine.looks - looks == len(llm.provider.banks)
        assert llm.provider.slots == 4
        assert tokens == list(calm.tokens)


def test_lasting_pressure_ends_at_the_least_slots_and_the_run_goes_on(calm):
    with mlx_ttd.load("demo", "400MB", slots=24) as llm:
        govern(llm, Machine(SHORT))
        assert generate(llm).digest == calm.digest
        assert llm.provider.slots == llm.store.spec.top_k
        assert llm.stats().counters.shrinks == 3


def test_a_run_ends_in_one_sentence_when_nothing_is_left_to_give_and_the_next_works(calm):
    with mlx_ttd.load("demo", "400MB", slots=24) as llm:
        machine = Machine(*[CALM] * 20, GONE)
        govern(llm, machine)
        chunks = []
        with pytest.raises(
            PressureError, match=r"^the run was stopped because only 10.00 MB of memory [^.]*\.$"
        ) as told:
            chunks.extend(llm.stream(PROMPT, max_tokens=24, temperature=0.0, ignore_eos=True))
        assert "\n" not in str(told.value)
        machine.readings = [CALM]
        assert generate(llm).digest == calm.digest


def test_swap_that_grows_shrinks_the_banks_each_time_it_has_grown_enough():
    with mlx_ttd.load("demo", "400MB", slots=24) as llm:
        readings = [replace(CALM, swap=CALM.swap + grown) for grown in (0, 2 * 10**8, 3 * 10**8, 5 * 10**8, 6 * 10**8)]
        machine = Machine(*readings)
        watch = governor(machine, llm.provider)
        slots = []
        for _ in readings:
            machine.pass_time(60)
            watch.check()
            slots.append(llm.provider.slots)
        assert slots == [24, 24, 12, 12, 6]


def looked(llm, watch, machine, seconds, reading):
    """The slots after `seconds` in which the machine said `reading`, looked at every second."""
    machine.readings = [reading]
    for _ in range(seconds):
        machine.pass_time(1)
        watch.check()
    return llm.provider.slots


def test_slots_that_were_given_back_are_taken_again_after_a_minute_of_calm():
    with mlx_ttd.load("demo", "400MB", slots=24) as llm:
        held, machine = llm.ledger.accounts["slots"], Machine(SHORT)
        watch = governor(machine, llm.provider)
        assert looked(llm, watch, machine, 1, SHORT) == 12
        assert looked(llm, watch, machine, 59, CALM) == 12
        assert looked(llm, watch, machine, 2, CALM) == 24
        assert llm.ledger.accounts["slots"] == held
        assert watch._counters.regrowths == 1


def test_slots_come_back_no_further_than_memory_is_free_and_the_budget_gave():
    with mlx_ttd.load("demo", "400MB", slots=24) as llm:
        machine = Machine(SHORT)
        watch = governor(machine, llm.provider)
        assert looked(llm, watch, machine, 2, SHORT) == 6
        size, least = llm.store.expert_bytes, Limits().memory + Limits().room
        assert looked(llm, watch, machine, 200, replace(CALM, memory=least + 6 * size - 1)) == 6
        assert looked(llm, watch, machine, 200, replace(CALM, memory=least + 6 * size)) == 12
        llm.ledger.enter("another model", llm.ledger.free)
        assert looked(llm, watch, machine, 200, CALM) == 12
        llm.ledger.leave("another model")
        assert looked(llm, watch, machine, 2000, CALM) == 24


def test_a_smaller_budget_is_not_outgrown():
    with mlx_ttd.load("demo", "400MB") as llm:
        machine = Machine(SHORT)
        watch = llm._core.governor
        watch._read, watch._clock = machine.read, machine.clock
        watch.begin()
        llm.set_memory(mlx_ttd.info("demo")["least_bytes"] + 4 * llm.store.expert_bytes)
        granted = llm.provider.slots
        assert looked(llm, watch, machine, 1, SHORT) < granted
        assert looked(llm, watch, machine, 1000, CALM) == granted < llm.store.spec.experts


def test_a_machine_that_gets_short_whenever_slots_come_back_is_left_alone_for_longer_each_time():
    with mlx_ttd.load("demo", "400MB", slots=24) as llm:
        machine = Machine(CALM)
        watch = governor(machine, llm.provider)
        for _ in range(20_000):
            machine.readings = [SHORT if llm.provider.slots == 24 else CALM]
            machine.pass_time(1)
            watch.check()
        # After 60, 120, ... 1,920 and then 3,600 seconds each.
        assert watch._counters.regrowths == 10


@pytest.mark.parametrize("when", [1, 5, 30])
def test_growing_at_any_time_changes_no_bit(when, calm):
    with mlx_ttd.load("demo", "400MB", slots=16) as llm:
        govern(llm, Machine(SHORT, *[replace(CALM, memory=2 * 10**8)] * when, CALM))
        llm._core.governor._limits = replace(llm._core.governor._limits, calm=0.0)
        response = generate(llm)
        assert (response.digest, response.logits_digest) == (calm.digest, calm.logits_digest)
        assert llm.provider.slots == 16
        assert llm.stats().counters.regrowths == llm.stats().counters.shrinks == 1


def test_an_open_lease_keeps_its_slots_from_growing():
    with mlx_ttd.load("demo", "400MB", slots=24) as llm:
        machine = Machine(SHORT)
        watch = governor(machine, llm.provider)
        assert looked(llm, watch, machine, 1, SHORT) == 12
        waves = llm.provider.waves(0, np.array([0, 1]))
        lease = next(waves)
        assert looked(llm, watch, machine, 100, CALM) == 12
        lease.release(())
        assert looked(llm, watch, machine, 2, CALM) == 24


def test_swap_that_was_there_before_is_no_pressure_and_much_more_of_it_ends_a_run():
    machine = Machine(CALM, replace(CALM, swap=CALM.swap + 3 * 10**9))
    watch = governor(machine)
    watch.check()
    machine.pass_time(60)
    with pytest.raises(PressureError, match=r"swap grew by 3.00 GB"):
        watch.check()


def test_disk_that_runs_out_during_the_run_ends_it_but_a_full_disk_alone_does_not():
    full = replace(CALM, disk=5 * 10**8)
    machine = Machine(full, full)
    watch = governor(machine)
    watch.check()
    machine.pass_time(60)
    watch.check()
    machine.readings = [replace(CALM, disk=2 * 10**9)]
    watch.begin()
    watch.check()
    machine.readings = [full]
    machine.pass_time(60)
    with pytest.raises(PressureError, match=r"only 500.00 MB of disk are left, 1.50 GB less"):
        watch.check()


def test_an_open_lease_keeps_its_slots():
    with mlx_ttd.load("demo", "400MB", slots=24) as llm:
        machine = Machine(GONE)
        watch = governor(machine, llm.provider)
        waves = llm.provider.waves(0, np.array([0, 1]))
        lease = next(waves)
        watch.check()
        assert llm.provider.slots == 24
        lease.release(())
        machine.pass_time(60)
        watch.check()
        assert llm.provider.slots == 12


def test_looking_is_rare_and_rarer_where_it_is_dear():
    machine = Machine(CALM)
    watch = governor(machine)
    for _ in range(1000):
        watch.check()
        machine.pass_time(0.01)
    assert 9 <= machine.looks <= 11
    dear = Machine(CALM, cost=0.02)
    watch = governor(dear)
    for _ in range(1000):
        watch.check()
        dear.pass_time(0.01)
    assert 2 <= dear.looks <= 3


def test_this_machine_can_be_read():
    reading = machine_reading(Path(mlx_ttd.demo_path()))
    assert reading.memory > 0
    assert reading.swap >= 0
    assert reading.disk > 0
