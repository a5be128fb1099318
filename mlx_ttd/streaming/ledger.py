"""The hard bound: every byte the library keeps is entered here before it is allocated."""

from __future__ import annotations

import threading

from ..errors import BudgetError
from .memory import show_size

ALLOCATOR_RESERVE = 64_000_000


class Ledger:
    """Accounts of bytes under one total. Two models may share a ledger."""

    def __init__(self, total: int):
        self.total = total
        self.accounts: dict[str, int] = {}
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        return sum(self.accounts.values())

    @property
    def free(self) -> int:
        return self.total - self.used

    def enter(self, account: str, size: int) -> None:
        """Add `size` bytes to an account. BudgetError, and nothing entered, where that would pass the total."""
        with self._lock:
            if size > self.free:
                raise BudgetError(
                    f"{account} needs {show_size(size)} but {show_size(max(0, self.free))} of the "
                    f"{show_size(self.total)} budget are left; raise memory= or close another model.",
                    least_bytes=self.used + size,
                )
            self.accounts[account] = self.accounts.get(account, 0) + size

    def leave(self, account: str) -> None:
        """Close an account; its bytes are free again."""
        with self._lock:
            self.accounts.pop(account, None)
