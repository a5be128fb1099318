"""The loop of the process that renders templates: it ends when its standard input does."""

from __future__ import annotations

import sys
from typing import Any

from .bounds import bounded, settle
from .frames import HEAD, READY, REFUSED, RENDERED, as_bytes, body_length, head_of, unpacked
from .sandbox import Refused, render_template

WARM_UP = "{% for x in [1] %}{{ {'x': x} | tojson }}{% endfor %}{{ '\\N{BULLET}' }}{{ none.x }}"


def serve() -> None:
    """Answer each request with a frame: RENDERED and the text, or REFUSED and the sentence that says why."""
    settle()
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    answer(WARM_UP, {}, 100, 1.0, 1 << 30, "2000-01-01")
    answers.write(READY)
    answers.flush()
    while len(head := requests.read(HEAD)) == HEAD:
        body = answer(*unpacked(requests.read(body_length(head))))
        answers.write(head_of(body))
        answers.write(body)
        answers.flush()


def answer(text: str, values: dict[str, Any], characters: int, seconds: float, memory: int, now: str) -> bytes:
    try:
        with bounded(seconds, memory):
            return RENDERED + as_bytes(render_template(text, values, characters, now))
    except Refused as refusal:
        return REFUSED + as_bytes(str(refusal))
    except MemoryError:
        pass  # and its traceback, which holds the memory, is gone
    return REFUSED + as_bytes(
        f"The chat template takes more than {memory >> 20} MB, or makes more than {characters:,} characters of text."
    )
