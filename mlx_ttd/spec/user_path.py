"""Paths as users write them."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import OptionError


def user_path(path: str | os.PathLike[str]) -> Path:
    """`path` with a leading ~ or ~user expanded. OptionError for what can be no path on any system."""
    if not isinstance(path, str | os.PathLike) or isinstance(os.fspath(path), bytes):
        raise OptionError(f"{path!r} is a {type(path).__name__}; a path is a string or a pathlib.Path.")
    text = os.fspath(path)
    try:
        raw = os.fsencode(text)
    except UnicodeEncodeError:
        raise OptionError(f"the path {text!r} holds a lone surrogate, which no name has; write another path.") from None
    if b"\0" in raw:
        raise OptionError(f"the path {text!r} holds a NUL character, which no name has; write another path.")
    return Path(os.path.expanduser(text))


def absolute_path(path: str | os.PathLike[str]) -> Path:
    """As `user_path`, and good after the working directory has changed; links stay. OptionError where it is gone."""
    expanded = user_path(path)
    try:
        return Path(os.path.abspath(expanded))
    except FileNotFoundError:
        raise OptionError(f"{expanded} is relative to a directory that was removed; change to another.") from None
