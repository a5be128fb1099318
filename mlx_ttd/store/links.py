"""Links in a store: one that leads out of it is followed only where the user says so."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ..errors import StoreError


def refuse_links_out(root: Path, names: Iterable[str]) -> None:
    """StoreError for the first of these files of the store at `root` that a link takes out of it.

    The way to `root` may have links, and one that stays within is as good as the file.
    """
    home = os.path.realpath(root)
    for name in names:
        place = os.path.realpath(root / name)
        if os.path.commonpath((home, place)) != home:
            raise StoreError(
                f"{root / name} leads outside the store by a link, to {place}; if that is meant, allow it by "
                "follow_links=True, on the command line --follow-links, or put the file itself there."
            )
