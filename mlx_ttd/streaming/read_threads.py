"""Threads that read, for one model or several."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ..kernels import native_extension


def native_clock() -> Any:
    """A clock for `submit` of the native read pool; only where there is the native part."""
    extension: Any = native_extension()
    return extension.ReadClock()


class ReadThreads:
    """`depth` threads, native where there is the native part, from the first work until the last user has left."""

    def __init__(self, depth: int):
        self.depth = depth
        self._executor: ThreadPoolExecutor | None = None
        self._native: Any = None
        self._users: set[int] = set()
        self._lock = threading.Lock()

    def native(self, user: object) -> Any:
        """The native read pool, for `user`, which has to `leave` some day; None without the native part."""
        extension: Any = native_extension()
        if extension is None:
            return None
        with self._lock:
            self._users.add(id(user))
            if self._native is None:
                self._native = extension.ReadPool(self.depth)
            return self._native

    def submit(self, user: object, work: Callable[..., None], *arguments: Any) -> Future[None]:
        """Run `work(*arguments)` on a thread of Python's, for `user`, which has to `leave` some day."""
        with self._lock:
            self._users.add(id(user))
            if self._executor is None:
                self._executor = ThreadPoolExecutor(self.depth, thread_name_prefix="mlx_ttd-read")
            return self._executor.submit(work, *arguments)

    def leave(self, user: object) -> None:
        """End the threads if nobody else uses them. None of the user's work may be running."""
        with self._lock:
            self._users.discard(id(user))
            if self._users:
                return
            executor, self._executor = self._executor, None
            native, self._native = self._native, None
        if executor is not None:
            executor.shutdown(wait=True)
        if native is not None:
            native.close()
