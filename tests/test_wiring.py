"""`wire=True`: slots and resident weights stay in memory, nothing else does, and closing ends it."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import mlx_ttd
from mlx_ttd.kernels import device_kind
from mlx_ttd.streaming import wiring

linux = pytest.mark.skipif(sys.platform != "linux" or device_kind() != "cpu", reason="needs Linux")


def locked():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmLck:", 1)[1].split()[0]) * 1024


@pytest.fixture
def may_lock():
    """Skips where the system lets this process lock less than the demo model."""
    held = np.zeros(1 << 26, np.uint8)
    locks = wiring.PageLocks()
    locks.hold(held)
    locks.release_all()
    if locks.refused:
        pytest.skip("not run: the system does not let this process lock 64 MB")


@linux
def test_slots_and_weights_are_locked_through_resizes_and_released(may_lock):
    before = locked()
    with mlx_ttd.load("demo", "400MB", slots=24, wire=True) as llm:
        banks = llm.ledger.accounts["slots"]
        pages = 4096 * 2 * 400
        assert 0 <= locked() - before - llm.division.resident - banks <= pages
        response = llm.generate([5, 6, 7], max_tokens=8, ignore_eos=True)
        llm.provider.resize(12)
        assert 0 <= locked() - before - llm.division.resident - banks // 2 <= pages
        llm.set_memory("350MB")
        assert 0 <= locked() - before - llm.division.resident - banks <= pages
    assert locked() == before
    with mlx_ttd.load("demo", "400MB", slots=24) as llm:
        assert locked() == before
        again = llm.generate([5, 6, 7], max_tokens=8, ignore_eos=True)
    assert (again.digest, again.logits_digest) == (response.digest, response.logits_digest)


@linux
def test_what_the_system_refuses_is_said_once_and_nothing_stays_locked(monkeypatch, caplog):
    class Library:
        def __init__(self):
            self.locked = set()

        def mlock(self, address, size):
            if size.value > 10**6 and len(self.locked) > 3:
                return -1
            self.locked.add(address.value)
            return 0

        def munlock(self, address, size):
            self.locked.remove(address.value)
            return 0

    library = Library()
    monkeypatch.setattr(wiring.ctypes, "CDLL", lambda *given, **more: library)
    with caplog.at_level(logging.INFO, "mlx_ttd"), mlx_ttd.load("demo", "400MB", slots=24, wire=True) as llm:
        assert not library.locked
        llm.generate([5, 6, 7], max_tokens=2, ignore_eos=True)
    assert sum("memory is not wired" in record.message for record in caplog.records) == 1


@pytest.fixture
def limits(monkeypatch):
    """What a Metal device's wired limit has been, the program's own first."""
    limits = [123]

    def set_wired_limit(size):
        limits.append(size)
        return limits[-2]

    monkeypatch.setattr(wiring, "wired_limit", wiring.WiredLimit())
    monkeypatch.setattr(wiring, "device_kind", lambda: "metal")
    monkeypatch.setattr(mx, "set_wired_limit", set_wired_limit)
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 5000})
    return limits


def test_on_metal_the_limit_is_what_is_held_and_goes_back(limits):
    end = wiring.wire([mx.zeros(1000, mx.uint8), mx.zeros(250, mx.float32)], None)
    assert limits[-1] == 2000
    end()
    assert limits[-1] == 123
    wiring.wire([mx.zeros(10_000, mx.uint8)], None)
    assert limits[-1] == 5000


@pytest.mark.parametrize("first_closed", [0, 1])
def test_on_metal_the_limit_is_what_all_open_models_hold(limits, first_closed):
    ends = [wiring.wire([mx.zeros(size, mx.uint8)], None) for size in (1000, 3000)]
    assert limits[-1] == 4000
    third = wiring.wire([mx.zeros(2500, mx.uint8)], None)
    assert limits[-1] == 5000
    third()
    assert limits[-1] == 4000
    ends[first_closed]()
    assert limits[-1] == (3000, 1000)[first_closed]
    ends[first_closed]()
    assert limits[-1] == (3000, 1000)[first_closed]
    ends[1 - first_closed]()
    assert limits[-1] == 123
