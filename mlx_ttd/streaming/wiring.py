"""Keeps slots and resident weights in memory when the machine swaps, and nothing else."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Callable, Iterable

import mlx.core as mx
import numpy as np

from ..kernels import device_kind
from .memory import show_size
from .provider import ExpertProvider

log = logging.getLogger("mlx_ttd")


class PageLocks:
    """Arrays locked in memory by the system: every one that it is given, or none once the system has refused one."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None, use_errno=True)
        self._held: dict[int, int] = {}
        self.refused = False

    @property
    def held(self) -> int:
        """Bytes locked."""
        return sum(self._held.values())

    def hold(self, array: np.ndarray) -> None:
        """Lock `array`, contiguous, until it is released; that has to be before its memory goes."""
        if self.refused or not array.nbytes:
            return
        address = array.ctypes.data
        if self._library.mlock(ctypes.c_void_p(address), ctypes.c_size_t(array.nbytes)):
            wanted, reason = self.held + array.nbytes, os.strerror(ctypes.get_errno())
            self.release_all()
            self.refused = True
            log.info(
                "memory is not wired: the system would not lock %s (%s); raise `ulimit -l` if it swaps.",
                show_size(wanted),
                reason,
            )
            return
        self._held[address] = array.nbytes

    def release(self, array: np.ndarray) -> None:
        self._release(array.ctypes.data)

    def release_all(self) -> None:
        for address in list(self._held):
            self._release(address)

    def _release(self, address: int) -> None:
        size = self._held.pop(address, 0)
        if size:
            self._library.munlock(ctypes.c_void_p(address), ctypes.c_size_t(size))


class WiredLimit:
    """MLX's wired limit, which is one for the process: what all open models hold, and what it was once none is open."""

    def __init__(self) -> None:
        self._sizes: dict[object, int] = {}
        self._before = 0
        # Collecting a model releases it, which can happen while the same thread is in here.
        self._lock = threading.RLock()

    def hold(self, size: int) -> Callable[[], None]:
        """Add `size` bytes, up to what Metal recommends in all; calling the result takes them off again."""
        model = object()
        with self._lock:
            before = self._set(size + sum(self._sizes.values()))
            if not self._sizes:
                self._before = before
            self._sizes[model] = size

        def release() -> None:
            with self._lock:
                if self._sizes.pop(model, None) is None:
                    return
                if self._sizes:
                    self._set(sum(self._sizes.values()))
                else:
                    mx.set_wired_limit(self._before)

        return release

    def _set(self, size: int) -> int:
        return mx.set_wired_limit(min(size, int(mx.device_info()["max_recommended_working_set_size"])))


wired_limit = WiredLimit()


def wire(weights: Iterable[mx.array], provider: ExpertProvider | None) -> Callable[[], None]:
    """Wire `weights` and the banks of `provider`, also those that a later resize makes; calling the result ends it.

    On Metal this adds their size to `wired_limit`; on a CPU pages are locked; CUDA has nothing.
    """
    kind = device_kind()
    if kind == "cuda":
        log.info("memory is not wired: what a CUDA device holds is never swapped.")
        return lambda: None
    banks = [] if provider is None else provider.banks
    if kind == "metal":
        size = sum(array.nbytes for array in weights) + sum(bank.slots * bank.stride for bank in banks)
        return wired_limit.hold(size)
    locks = PageLocks()
    for array in weights:
        locks.hold(np.frombuffer(memoryview(array), np.uint8))  # type: ignore[arg-type]
    for bank in banks:
        bank.lock_with(locks.hold, locks.release)

    def unlock() -> None:
        for bank in banks:
            bank.lock_with(None, None)
        locks.release_all()

    return unlock
