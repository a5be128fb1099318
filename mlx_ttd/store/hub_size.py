"""What a conversion from the hub would download, for a sentence that names the cost."""

from __future__ import annotations

TIMEOUT = 5.0


def hub_bytes(name: str) -> int | None:
    """Bytes of the safetensors files of a hub repository; None where the hub does not tell within seconds."""
    from huggingface_hub import HfApi

    try:
        found = HfApi().model_info(name, files_metadata=True, timeout=TIMEOUT)
    except Exception:  # without a network there is a sentence all the same, only without the size
        return None
    sizes = [file.size or 0 for file in found.siblings or [] if file.rfilename.endswith(".safetensors")]
    return sum(sizes) or None
