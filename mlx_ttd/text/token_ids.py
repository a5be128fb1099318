"""Token ids as users give them: integers of any library, in a list or an array."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from ..errors import OptionError


def token_ids(ids: Any, name: str, wanted: str) -> list[int]:
    """`ids` as integers. OptionError, which says that `name` must be `wanted`, where they are none."""
    listed = ids.tolist() if hasattr(ids, "tolist") else ids
    if not isinstance(listed, Sequence) or isinstance(ids, str | bytes | bytearray | memoryview):
        raise OptionError(f"{name} is of type {type(ids).__name__}; it must be {wanted}.")
    found = []
    for token in listed:
        try:
            if isinstance(token, bool):
                raise TypeError
            found.append(operator.index(token))
        except TypeError:
            raise OptionError(f"{name} holds {token!r}; it must be {wanted}.") from None
    return found
