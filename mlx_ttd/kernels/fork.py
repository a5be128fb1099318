"""Whether this process was forked from one in which MLX had worked, and so lacks threads that it would wait for."""

from __future__ import annotations

import os

import mlx.core as mx

from ..errors import BusyError

_worked = False
_forked = False


def _before_fork() -> None:
    global _worked
    # An evaluation allocates, and MLX counts that for the host application's arrays too.
    _worked = _forked or bool(mx.get_peak_memory() or mx.get_active_memory() or mx.get_cache_memory())


def _in_child() -> None:
    global _forked
    _forked = _worked


os.register_at_fork(before=_before_fork, after_in_child=_in_child)


def require_unforked() -> None:
    """BusyError in a process in which MLX would wait for ever."""
    if _forked:
        raise BusyError(
            "this process was forked after MLX had been used, and MLX does not work in such a child; start a fresh "
            'process instead (multiprocessing\'s "spawn"), and load the model there.'
        )
