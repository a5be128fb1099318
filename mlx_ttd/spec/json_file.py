"""JSON that somebody else made, read in bounded time and memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .regular_file import read_small

CONFIG_BYTES = 4 << 20
# A header of 93 thousand tensors has 0.8 million. Bytes alone are no bound: Python's objects for three can take 60.
MOST_VALUES = 1 << 20


def parse_json(text: bytes, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """The JSON value that UTF-8 `text` spells; ValueError for none or one of over `MOST_VALUES` values.

    pairs: makes an object of its names and values.
    """
    # Each value but the first of a list or object follows a comma, and each of these opens with a bracket.
    if text.count(b",") + text.count(b"[") + text.count(b"{") > MOST_VALUES:
        raise ValueError(f"it has more than {MOST_VALUES:,} values, which no such file has")
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=pairs)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path, limit: int = CONFIG_BYTES) -> dict[str, Any]:
    """Read an untrusted JSON object of at most `limit` bytes; ConfigError names the file otherwise."""
    return json_object(read_small(path, limit, ConfigError, "a model directory needs it"), path)


def json_object(text: bytes, path: Path) -> dict[str, Any]:
    """The untrusted JSON object that was read from `path`; ConfigError names the file where it is none."""
    try:
        data = parse_json(text)
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}.") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds a {type(data).__name__} where a JSON object is needed.")
    return data
