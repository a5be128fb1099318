"""What a conversion from the hub would download, for a sentence that names the cost."""

from __future__ import annotations

from .hub_listing import list_files
from .hub_patience import Patience
from .hub_transfer import Remote

SECONDS = 5.0


def hub_bytes(name: str) -> int | None:
    """Bytes of the safetensors files of a hub repository; None where the hub does not tell within seconds."""
    try:
        _, files = list_files(Remote(name, None, Patience(tries=1, whole_s=SECONDS)))
    except Exception:  # without a network there is a sentence all the same, only without the size
        return None
    return sum(file.size or 0 for name, file in files.items() if name.endswith(".safetensors")) or None
