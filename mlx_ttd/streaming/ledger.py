"""The hard bound: every byte the library keeps is entered here before it is allocated."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from weakref import WeakSet

from ..errors import BudgetError
from .memory import show_size

ALLOCATOR_RESERVE = 64_000_000


@dataclass
class Total:
    """A budget in bytes and the ledgers that keep it together."""

    size: int
    ledgers: WeakSet[Ledger] = field(default_factory=WeakSet)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Ledger:
    """Accounts of bytes under one total. One opened `beside` another has own accounts under the other's total."""

    def __init__(self, total: int = 0, beside: Ledger | None = None):
        self._total: Total = Total(total) if beside is None else beside._total
        self._total.ledgers.add(self)
        self.accounts: dict[str, int] = {}

    @property
    def total(self) -> int:
        return self._total.size

    @total.setter
    def total(self, size: int) -> None:
        self._total.size = size

    @property
    def own(self) -> int:
        """Bytes in this ledger's own accounts."""
        return sum(self.accounts.values())

    @property
    def used(self) -> int:
        """Bytes entered under the total, in this ledger and those beside it."""
        return sum(ledger.own for ledger in self._total.ledgers)

    @property
    def free(self) -> int:
        return self.total - self.used

    def enter(self, account: str, size: int) -> None:
        """Add `size` bytes to an account. BudgetError, and nothing entered, where that would pass the total."""
        with self._total.lock:
            if size > self.free:
                raise BudgetError(
                    f"{account} needs {show_size(size)} but {show_size(max(0, self.free))} of the "
                    f"{show_size(self.total)} budget are left; raise memory= or close another model.",
                    least_bytes=self.used + size,
                )
            self.accounts[account] = self.accounts.get(account, 0) + size

    def leave(self, account: str) -> None:
        """Close an account; its bytes are free again."""
        with self._total.lock:
            self.accounts.pop(account, None)
