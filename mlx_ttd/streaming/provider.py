"""Brings the experts a step wants into slots and lends them out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FrameType

import mlx.core as mx
import numpy as np

from ..errors import BusyError
from ..kernels import to_device
from ..observe import Counters, cancel_point
from ..spec import RecordLayout
from ..store import Store
from .arrival import Arrival
from .budget import require_slots
from .claim import Call, Claims, Using
from .lease import Lease
from .ledger import Ledger
from .policies import make_policy
from .prefetch import NextLayer
from .read_pool import Batch, NativeBatch, ReadPool
from .record_files import RecordFiles
from .slots import EMPTY, SlotBank

# Choices that are kept until they are counted: of so many steps, and of so many ids (4 MB) beside the last two steps.
UNREAD_STEPS, UNREAD_IDS = 16, 1 << 20


class ExpertProvider:
    """Experts of every layer of a store, `slots` of them a layer in memory at a time.

    Enters its banks in `ledger`. `verify`: when a record's SHA-256 is compared, "off", "first-read" or "always".
    `before_call`, when set, is called before slots are taken; it may resize the banks or raise.
    """

    def __init__(
        self,
        store: Store,
        slots: int,
        ledger: Ledger,
        counters: Counters,
        pool: ReadPool,
        policy: str = "lfu",
        verify: str = "first-read",
        read_mode: str = "cached",
        prefetch: str = "off",
    ):
        self.store, self.ledger, self.counters, self.pool = store, ledger, counters, pool
        self.policy = policy
        require_slots(store.spec, slots)
        experts = store.spec.experts
        self.slots = min(slots, experts)
        ledger.enter("slots", self.slots * store.expert_bytes)
        strides = [layout.stride for layout in store.layouts if layout is not None]
        self.banks = [SlotBank(experts, self.slots, stride, make_policy(policy, experts)) for stride in strides]
        self._files = RecordFiles(store, verify, read_mode)
        self._unread_ids: list[tuple[int, mx.array]] = []
        self._unread = 0
        self._claims = Claims()
        self._lazy = False
        self.next_layer = NextLayer(self.banks, counters, self._submit) if prefetch == "next-layer" else None
        self.before_call: Callable[[], None] | None = None

    def begin_call(self, layer: int, frame: FrameType) -> Call | None:
        """Claim the experts for a call that `frame` runs, to be handed to `end_call`; None within a claim of its own.

        A call that was interrupted is undone here. BusyError while another thread's goes on.
        """
        return self._claims.begin(frame, self.banks[layer])

    def end_call(self, call: Call | None) -> None:
        if call is not None:
            # Its outputs may wait to be evaluated, in this thread alone.
            self._lazy = True
            self._claims.end(call)

    def using(self) -> Using:
        """A block of steps that nothing interrupts, whose frame has the claim."""
        return Using(self._claims, self.settle_lazy)

    def settle_here(self) -> None:
        """Evaluate what this thread left to be evaluated, so that another can use the model."""
        if not self._lazy:
            return
        call = self._claims.begin(sys._getframe(), None)
        try:
            with suppress(BusyError):
                self.settle_lazy()
        finally:
            self._claims.end(call)

    def settle_lazy(self) -> None:
        """Evaluate what calls outside of `using` left to be evaluated; BusyError where only another thread can."""
        if self._lazy:
            for bank in self.banks:
                bank.settle()
            self._lazy = False

    def layout(self, layer: int) -> RecordLayout:
        """Where the parts of a record of `layer` lie."""
        layout = self.store.layouts[layer]
        assert layout is not None
        return layout

    @property
    def lent(self) -> bool:
        """Whether a lease is open."""
        return any(bank.pins_held() for bank in self.banks)

    def resize(self, slots: int) -> None:
        """Give every layer `slots` slots; banks start empty. Each layer's old buffer goes before its new one comes."""
        slots = max(self.store.spec.top_k, min(slots, self.store.spec.experts))
        self._land_all()
        self.settle()
        self.ledger.leave("slots")
        self.ledger.enter("slots", slots * self.store.expert_bytes)
        for bank in self.banks:
            bank.allocate(slots)
        self.counters.reallocations += len(self.banks)
        self.slots = slots

    def clear(self) -> None:
        """Empty every slot and forget what was used, as if just loaded."""
        self._land_all()
        self.settle()
        for bank in self.banks:
            bank.allocate(bank.slots)
            bank.policy = make_policy(self.policy, bank.experts)
        self.counters.reallocations += len(self.banks)

    def waves(self, layer: int, ids: np.ndarray) -> Iterator[Lease]:
        """Leases that together hold every expert in `ids` (any shape), in ascending expert id.

        One lease if the slots hold them all; otherwise groups of half the slots, the next read while one is used.
        A lease is released, by evaluating its outputs if need be, when the next is asked for.
        """
        yield from self._in_waves(layer, self._begin_call(layer, ids))

    def _begin_call(self, layer: int, ids: np.ndarray) -> np.ndarray:
        """The distinct `ids`, once `before_call` had its say: what is in memory is to be looked at afterwards."""
        wanted = np.unique(ids)
        self._land(layer, wanted)
        if self.before_call is not None:
            self.before_call()
        return wanted

    def _in_waves(self, layer: int, wanted: np.ndarray) -> Iterator[Lease]:
        bank = self.banks[layer]
        bank.policy.used(wanted)
        size = len(wanted) if len(wanted) <= bank.slots else max(1, bank.slots // 2)
        groups = [wanted[i : i + size] for i in range(0, len(wanted), size)]
        arrival: Arrival | None = self._fetch(layer, groups[0], wanted)
        for i, group in enumerate(groups):
            assert arrival is not None
            arrival.wait()
            lease = self._lend(bank, group, holds_all=len(groups) == 1)
            arrival = None
            try:
                cancel_point()
                if i + 1 < len(groups):
                    arrival = self._fetch(layer, groups[i + 1], wanted[(i + 1) * size :])
                with lease:
                    yield lease
            except BaseException:
                lease.release(())
                if arrival is not None:
                    arrival.abandon()
                raise

    def arrivals(self, layer: int, ids: np.ndarray) -> Iterator[Lease]:
        """As `waves`, but where the slots hold all: the experts in memory first, then the others as they are read.

        So those that are there are computed meanwhile; `lease.experts` tells which are lent.
        """
        wanted = self._begin_call(layer, ids)
        bank = self.banks[layer]
        there = bank.slot_of[wanted] != EMPTY
        if len(wanted) > bank.slots or there.all():
            yield from self._in_waves(layer, wanted)
            return
        bank.policy.used(wanted)
        arrival = self._fetch(layer, wanted, wanted)
        try:
            arrival.group = arrival.missing
            if there.any():
                with self._lend(bank, wanted[there], holds_all=False) as lease:
                    yield lease
            while len(arrival.missing):
                landed = arrival.some()
                with self._lend(bank, landed, holds_all=len(landed) == len(wanted)) as lease:
                    yield lease
        except BaseException:
            arrival.abandon()
            raise

    def resident(self, layer: int, ids: mx.array) -> Lease | None:
        """A lease on the whole layer, without reading `ids` back, if all its experts are in memory; else None."""
        lease = self.whole(layer)
        if lease is not None:
            self.count_later(layer, ids)
        return lease

    def whole(self, layer: int) -> Lease | None:
        """A lease on every expert of `layer` if all are in memory; else None."""
        bank = self.banks[layer]
        if not bank.everything_resident or (self.next_layer is not None and self.next_layer.flying(layer)):
            return None
        if bank.full_table is None:
            bank.full_table = to_device(bank.slot_of)
        assert bank.records is not None
        return Lease(bank.records, bank.full_table, lambda after: None, np.arange(bank.experts))

    def count_later(self, layer: int, ids: mx.array) -> None:
        """Count the choices `ids` some steps later or at the next `settle`, so that no step waits for them."""
        self._unread_ids.append((layer, ids))
        self._unread += ids.size
        if len(self._unread_ids) >= UNREAD_STEPS * len(self.banks) or self._unread > UNREAD_IDS:
            self._count(max(0, len(self._unread_ids) - 2 * len(self.banks)))

    def settle(self) -> None:
        """Count the choices of steps that were never read back, and finish released leases."""
        self._count(len(self._unread_ids))
        for bank in self.banks:
            bank.settle()

    def _count(self, oldest: int) -> None:
        unread, self._unread_ids = self._unread_ids[:oldest], self._unread_ids[oldest:]
        for layer, ids in unread:
            self._unread -= ids.size
            try:
                chosen = np.unique(np.array(ids))
            except RuntimeError:
                # Another thread's, not evaluated there yet.
                continue
            self.banks[layer].policy.used(chosen)
            self.counters.requests += len(chosen)
            self.counters.hits += len(chosen)

    def _lend(self, bank: SlotBank, group: np.ndarray, holds_all: bool) -> Lease:
        slots = bank.slot_of[group]
        table = np.full(bank.experts, EMPTY, np.int32)
        table[group] = slots
        assert bank.records is not None
        return Lease(bank.records, to_device(table), lambda after: bank.unpin(slots, after), group, holds_all)

    def _fetch(self, layer: int, group: np.ndarray, keep: np.ndarray) -> Arrival:
        """Pin slots for `group` and start reading what is missing."""
        bank = self.banks[layer]
        missing = bank.take(group, keep)
        self.counters.requests += len(group)
        self.counters.hits += len(group) - len(missing)
        self.counters.misses += len(missing)
        arrival = Arrival(bank, group, missing, [bank.row(int(expert)) for expert in missing])
        call = self._claims.current
        if call is not None and call.bank is bank:
            call.arrivals.append(arrival)
        try:
            if len(missing):
                arrival.batch = self._submit(layer, missing, arrival.rows)
        except BaseException:
            arrival.give_up()
            raise
        return arrival

    def _submit(self, layer: int, experts: np.ndarray, rows: list[memoryview]) -> Batch | NativeBatch:
        pairs = zip(experts, rows, strict=True)
        return self.pool.submit([self._files.read(layer, int(expert), row) for expert, row in pairs])

    def _land(self, layer: int, wanted: np.ndarray) -> None:
        if self.next_layer is not None:
            self.next_layer.land(layer, wanted)

    def _land_all(self) -> None:
        if self.next_layer is not None:
            self.next_layer.land_all()

    def close(self) -> None:
        """Give slots and files back. The provider cannot be used afterwards."""
        self._unread_ids.clear()
        self._land_all()
        self.pool.close()
        for bank in self.banks:
            bank.settle()
            bank.pins[:] = 0
            bank.allocate(0)
        self.ledger.leave("slots")
        self._files.close()
