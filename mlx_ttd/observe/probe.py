"""The hook through which a run can be watched: layers note what they made, and nobody listens unless asked to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import mlx.core as mx

MODEL = -1


class Probe(Protocol):
    """Told of each quantity as it is made. `layer` is MODEL for what belongs to no layer."""

    def note(self, layer: int, name: str, arrays: tuple[mx.array, ...]) -> None: ...


_probes: tuple[Probe, ...] = ()


def note(layer: int, name: str, *arrays: mx.array) -> None:
    """Tell the probes that `name` was made in `layer`: rows [T, ...] of each array, possibly not evaluated yet."""
    for probe in _probes:
        probe.note(layer, name, arrays)


def watched() -> bool:
    """Whether a probe is listening."""
    return bool(_probes)


@contextmanager
def probing(probe: Probe) -> Iterator[None]:
    """Let `probe` watch this process's runs for the length of a with block."""
    global _probes
    before = _probes
    _probes = (*before, probe)
    try:
        yield
    finally:
        _probes = before
