"""The files that a checkpoint directory may hold: plain ones, and links that stay in it or in its Hub cache."""

from __future__ import annotations

from pathlib import Path

from ..errors import CheckpointError
from ..spec import require_regular
from .format import VERBATIM, verbatim

SNAPSHOTS, BLOBS, REPOSITORY = "snapshots", "blobs", "models--"


def _blobs(root: Path) -> Path | None:
    """The folder that the links of a snapshot lead to, models--X/blobs, where `root` (resolved) lies in one."""
    for folder in (root, *root.parents):
        if folder.parent.name == SNAPSHOTS and folder.parent.parent.name.startswith(REPOSITORY):
            return folder.parent.parent / BLOBS
    return None


def plain_file(root: Path, name: str) -> Path | None:
    """The path of a file of the checkpoint `root`; None where there is none.

    Raises CheckpointError for anything but a regular file, reached by links within `root` or to the blobs of the Hub
    cache that `root` is a snapshot of. `root` itself may be a link.
    """
    path = root / name
    try:
        if not path.is_symlink() and not path.exists():
            return None
        base, found = root.resolve(strict=True), path.resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as failure:  # a loop of links is a RuntimeError before Python 3.13
        reason = getattr(failure, "strerror", None) or "it leads in a circle or has no file's name"
        raise CheckpointError(f"{path} cannot be followed: {reason}; download it again.") from None
    if base not in found.parents and found.parent != _blobs(base):
        raise CheckpointError(
            f"{path} is a link to {found}, outside the checkpoint and its Hub cache; put the file itself there."
        )
    require_regular(path, CheckpointError)
    return path


def verbatim_names(root: Path) -> list[str]:
    """The files that a store has as they are, whether they are there or not, and the named templates that are."""
    templates = (path.relative_to(root).as_posix() for path in root.glob("*/*.jinja"))
    return verbatim((*VERBATIM, *templates))
