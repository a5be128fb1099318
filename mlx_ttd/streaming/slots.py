"""One layer's bank of slots: a single buffer, who sits where, and who may not be moved."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from ..errors import BusyError, LeaseError
from ..kernels import bank_write, device_kind, in_huge_pages, to_device
from ..spec import STRIDE_UNIT
from .claim import rebuilt
from .policies import Policy

EMPTY = -1
Hold = Callable[[np.ndarray], None]
MOST_RELEASES = 32


def _aligned_bank(slots: int, stride: int) -> mx.array:
    """uint8 [slots, stride] whose data starts on a 16 KiB boundary, as direct reads need."""
    # Words, of which MLX's 32-bit shapes count eight times as many bytes in one dimension.
    flat = mx.zeros((slots * stride + STRIDE_UNIT) // 8, dtype=mx.uint64)
    mx.eval(flat)
    start = -np.array(flat, copy=False).ctypes.data % STRIDE_UNIT // 8
    bank = flat[start : start + slots * stride // 8].reshape(slots, stride // 8).view(mx.uint8)
    mx.eval(bank)
    in_huge_pages(bank)
    return bank


class SlotBank:
    """Slots of one layer: `records` uint8 [slots, stride], `slot_of` int32 [experts], `expert_in` int32 [slots]."""

    def __init__(self, experts: int, slots: int, stride: int, policy: Policy):
        self.experts, self.stride, self.policy = experts, stride, policy
        self._pending: list[tuple[np.ndarray, Sequence[mx.array]]] = []
        self._host_writes = device_kind() != "cuda"
        self._host: np.ndarray | None = None
        self._hold: Hold | None = None
        self._let_go: Hold | None = None
        self.allocate(slots)

    def allocate(self, slots: int) -> None:
        """Drop the buffer and everything in it, then make one of `slots` slots. No lease may be open."""
        self.settle()
        if slots and self.pins_held():
            raise LeaseError("a bank cannot be resized while a lease on it is open; release it first.")
        if self._let_go is not None and self._host is not None:
            self._let_go(self._host)
        self.records: mx.array | None = None
        self._host = None
        self.slots = slots
        self.slot_of = np.full(self.experts, EMPTY, np.int32)
        self.expert_in = np.full(slots, EMPTY, np.int32)
        self.pins = np.zeros(slots, np.int32)
        self._held = np.zeros(slots, np.int32)  # by pending arrays
        self.full_table: mx.array | None = None
        if slots:
            if self._host_writes:
                self.records = _aligned_bank(slots, self.stride)
                self._host = np.array(self.records, copy=False)
                if self._hold is not None:
                    self._hold(self._host)
            else:
                self.records = mx.zeros((slots, self.stride), dtype=mx.uint8)

    def lock_with(self, hold: Hold | None, let_go: Hold | None) -> None:
        """Hand this buffer and every later one to `hold`, and to `let_go` before it is dropped."""
        self._hold, self._let_go = hold, let_go
        if hold is not None and self._host is not None:
            hold(self._host)

    def pins_held(self) -> bool:
        return bool(getattr(self, "pins", np.zeros(0)).any())

    @property
    def everything_resident(self) -> bool:
        return self.slots >= self.experts and bool((self.slot_of != EMPTY).all())

    def take(self, experts: np.ndarray, keep: np.ndarray) -> np.ndarray:
        """Pin slots for `experts` (ascending, distinct), evicting others; returns those that must be read.

        Evicts experts outside `keep` first. LeaseError when open leases leave too few slots.
        """
        slots = self.slot_of[experts]
        missing, here = experts[slots == EMPTY], slots[slots != EMPTY]
        self.pins[here] += 1
        if len(missing):
            free = np.flatnonzero((self.expert_in == EMPTY) & (self.pins == 0))[: len(missing)]
            short = len(missing) - len(free)
            if short:
                movable = self.expert_in[(self.expert_in != EMPTY) & (self.pins == 0)]
                if len(movable) < short:
                    self.pins[here] -= 1
                    raise LeaseError(
                        f"{len(experts)} experts are wanted but only {len(free) + len(movable)} of {self.slots} slots "
                        "are not leased; release leases before asking for more."
                    )
                kept = np.zeros(self.experts, bool)
                kept[keep] = True
                victims = self.policy.victims(movable[~kept[movable]], short)
                if len(victims) < short:
                    wanted = movable[kept[movable]]
                    victims = np.concatenate([victims, self.policy.victims(wanted, short - len(victims))])
                freed = self.slot_of[victims]
                self.slot_of[victims] = EMPTY
                self.expert_in[freed] = EMPTY
                free = np.concatenate([free, freed])
            # The bytes of a slot that is about to be overwritten must not be wanted by a kernel that has not run yet.
            if self._held[free].any():
                self.settle()
            self.pins[free] += 1
            self.slot_of[missing] = free
        return missing

    def seat(self, experts: np.ndarray) -> None:
        """The slots of `experts` now hold their records."""
        self.expert_in[self.slot_of[experts]] = experts
        self.policy.inserted(experts)

    def forget(self, experts: np.ndarray) -> None:
        """Reading `experts` failed: their slots are empty again."""
        self.slot_of[experts] = EMPTY

    def unpin(self, slots: np.ndarray, after: Sequence[mx.array]) -> None:
        """Drop one pin of `slots`; the slots may be overwritten once `after` is evaluated."""
        self.pins[slots] -= 1
        if after:
            self._held[slots] += 1
            self._pending.append((slots, list(after)))
            if len(self._pending) >= MOST_RELEASES:
                self._evaluate(MOST_RELEASES // 2)

    def settle(self) -> None:
        """Evaluate what released leases still wait for."""
        self._evaluate(len(self._pending))

    @property
    def waits(self) -> bool:
        """Whether a released lease still waits for arrays."""
        return bool(self._pending)

    def put_right(self, pins: np.ndarray) -> None:
        """After a call that was interrupted anywhere: `pins` are those before it, and what did not arrive is gone."""
        if self.records is None and self.slots:
            self.pins[:] = 0
            self.allocate(self.slots)
        self.pins[:] = pins if len(pins) == self.slots else 0
        self._held[:] = 0
        for slots, _ in self._pending:
            self._held[slots] += 1
        self.slot_of = rebuilt(self.expert_in, self.experts, EMPTY)
        self.full_table = None

    def _evaluate(self, oldest: int) -> None:
        done = self._pending[:oldest]
        try:
            mx.eval([arrays for _, arrays in done])
        except RuntimeError as error:
            # MLX evaluates a graph in the thread that built it alone.
            if "Stream" not in str(error):
                raise
            raise BusyError(
                "what the experts of this model made in another thread is not evaluated there yet; call mx.eval on it "
                "there, then use the model here."
            ) from None
        del self._pending[:oldest]
        for slots, _ in done:
            self._held[slots] -= 1

    def row(self, expert: int) -> memoryview:
        """Where the record of `expert` is to be written: its slot, or staging where the host cannot write slots."""
        if self._host is None:
            return np.empty(self.stride, np.uint8).data
        return self._host[self.slot_of[expert]].data

    def deliver(self, experts: np.ndarray, rows: list[memoryview]) -> None:
        """Move staged rows into their slots, where `row` gave staging."""
        if self._host is None and len(experts):
            records, self.records = self.records, None
            assert records is not None
            for expert, row in zip(experts, rows, strict=True):
                records = bank_write(records, int(self.slot_of[expert]), to_device(np.frombuffer(row, np.uint8)))
            self.records = records
            mx.eval(self.records)
