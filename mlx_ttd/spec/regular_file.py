"""Opening and reading files that somebody else made: regular ones alone, bounded, and never waiting for a writer."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from ..errors import TTDError

FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
KINDS = {
    stat.S_IFDIR: "directory",
    stat.S_IFIFO: "FIFO",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
}
# How the text begins that Git keeps in the place of a large file until it is fetched.
POINTER = b"version https://git-lfs.github.com/spec/"


def pointer_sentence(path: Path) -> str:
    """What to say of a Git LFS pointer in the place of the file."""
    return f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull` where it was cloned."


def _require_regular(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is a {kind} where a file is needed")


def require_regular(path: Path, error: type[TTDError]) -> None:
    """Raise `error` where something lies at `path` that is no regular file, or a link that leads to nothing."""
    try:
        _require_regular(os.stat(path))
    except FileNotFoundError:
        if os.path.islink(path):
            raise error(f"{path} is a link to a file that does not exist; put the file there.") from None
    except OSError as failure:
        raise error(f"{path} cannot be used: {failure.strerror}; put the file there, or remove it.") from None


def open_regular(path: str | os.PathLike[str], flags: int = 0) -> int:
    """A read-only descriptor of a regular file. OSError at once for a directory, FIFO, socket or device, unopened."""
    _require_regular(os.stat(path))
    fd = os.open(path, FLAGS | flags)
    try:
        # What lies there may have changed since.
        _require_regular(os.fstat(fd))
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_small(path: Path, limit: int, error: type[TTDError], hint: str) -> bytes:
    """The bytes of a file of at most `limit`; `error` names the file otherwise, with `hint` where there is none."""
    try:
        with open(open_regular(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read(size) if size <= limit else b""
    except FileNotFoundError:
        what = "is a link to a file that does not exist" if os.path.islink(path) else "does not exist"
        raise error(f"{path} {what}; {hint}.") from None
    except OSError as failure:
        raise error(f"{path} cannot be read: {failure.strerror}; {hint}.") from None
    if size > limit:
        raise error(f"{path} is larger than {limit:,} bytes, which no such file is; check where it comes from.")
    if data.startswith(POINTER):
        raise error(pointer_sentence(path))
    return data
