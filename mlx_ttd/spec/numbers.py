"""Numbers as users give them."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any


def plain_number(value: Any) -> Any:
    """A number of any library, such as numpy's, as Python's own; anything else as it is."""
    if isinstance(value, int | float):
        return value
    return int(value) if isinstance(value, Integral) else float(value) if isinstance(value, Real) else value
