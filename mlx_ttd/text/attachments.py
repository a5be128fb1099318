"""What a message may carry beside text, and that a language model cannot be given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import TemplateError

KINDS = ("image", "video", "audio", "file")
FIELDS = ("images", "videos", "audios", "audio")


def _kind(part: Any) -> str | None:
    """The medium of a content part: of its type ("image_url", "input_audio") or of a field that holds it."""
    if not isinstance(part, Mapping):
        return None
    said = str(part.get("type", ""))
    return next((kind for kind in KINDS if kind in said or part.get(kind) or part.get(f"{kind}_url")), None)


def require_text(message: Mapping[str, Any], index: int) -> None:
    """TemplateError where the message holds an image, video, sound or file, which a template would drop or name."""
    content = message.get("content")
    found = [kind for part in (content if isinstance(content, list) else [content]) if (kind := _kind(part))]
    found += [name.removesuffix("s") for name in FIELDS if message.get(name)]
    if found:
        raise TemplateError(
            f"Message {index} holds {'an' if found[0][0] in 'ai' else 'a'} {found[0]}, and the model is given text "
            "alone; leave it out, or describe it in words."
        )
