"""Prefill's products of 4-bit weights in bf16: faster on processors with tiles for it, and less exact, so an option.

A product of two numbers rounded to bf16 is off by at most 2^-7 + 2^-16 of its magnitude, so a sum of n is within
(2^-7 + 2^-16 + n 2^-24) times the sum of the products' magnitudes; denormal numbers count as zero. As errors have
either sign, a sum of 2,048 is in practice some sixty times nearer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .backend import chosen
from .native import extension


class _Asked(threading.local):
    on = False


_asked = _Asked()


def has_bf16_products() -> bool:
    """Whether this machine, with the implementations in use, can make them: natively on a CPU with AMX-BF16."""
    native = extension() if chosen("linear") == "native" else None
    return native is not None and native.has_bf16_products()


def _ask(on: bool) -> None:
    native = extension() if on != _asked.on else None
    if native is not None:
        native.set_bf16_products(on)
        _asked.on = on


@contextmanager
def bf16_products(on: bool) -> Iterator[None]:
    """Whether what this thread asks for in "prefill" mode within is multiplied so; bits do not depend on chunks."""
    before = _asked.on
    _ask(on)
    try:
        yield
    finally:
        _ask(before)
