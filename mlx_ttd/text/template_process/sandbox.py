"""Jinja for templates that nobody has vouched for: no access to Python.

Time and memory are the process's to bound, whatever a template calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from types import CodeType
from typing import Any

import jinja2.debug  # noqa: F401  imported by Jinja with the first error
from jinja2 import nodes
from jinja2.exceptions import TemplateError as JinjaError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

TEMPLATE_CHARACTERS = 1_000_000
REASON_CHARACTERS = 300


class Refused(Exception):
    """A sentence that says why a template was not rendered."""


class Generation(Extension):
    """{% generation %}, which marks the assistant's words for training; here it only opens a scope."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class Sandbox(ImmutableSandboxedEnvironment):
    """An environment for one rendering, with what transformers gives to chat templates. `now` is an ISO date."""

    def __init__(self, now: str):
        # What a template never reaches is not computed while it is compiled.
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols], optimized=False)
        self.globals.update(
            raise_exception=raise_exception,
            strftime_now=lambda layout: strftime(datetime.fromisoformat(now), layout),
            dict=lambda *a, **k: dict(*a, **k),
        )
        self.filters["tojson"] = to_json


def raise_exception(message: str) -> None:
    raise JinjaError(message)


def strftime(now: datetime, layout: str) -> str:
    # Some systems answer a width that they cannot fill with no text at all.
    if re.search(r"%[^%a-zA-Z]*\d{4}", layout):
        raise Refused("The chat template uses a date format that is too long.")
    return now.strftime(layout)


def to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Plain JSON; Jinja's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=8)
def compiled(text: str) -> CodeType:
    try:
        return Sandbox("").compile(text)
    except MemoryError:  # which is also what Python says of code that is nested too deeply
        raise Refused("The chat template is too large or nested too deeply to be compiled.") from None


def render_template(text: str, values: Mapping[str, Any], characters: int, now: str) -> str:
    """Render `text` to at most `characters`; any failure but MemoryError becomes one Refused that names the line."""
    if len(text) > TEMPLATE_CHARACTERS:
        raise Refused(f"The chat template is longer than {TEMPLATE_CHARACTERS:,} characters; pass another template.")
    try:
        code, sandbox = compiled(text), Sandbox(now)
        template = sandbox.template_class.from_code(sandbox, code, sandbox.make_globals(None))
        pieces, length = [], 0
        for piece in template.generate(values):
            pieces.append(piece)
            length += len(piece)
            if length > characters:
                raise Refused(f"The chat template makes more than {characters:,} characters of text.")
        return "".join(pieces)
    except (Refused, MemoryError):
        raise
    except Exception as error:
        raise Refused(failure(error)) from None


def failure(error: Exception) -> str:
    line = f" (line {found})" if (found := getattr(error, "lineno", None)) else ""
    reason = " ".join(str(error).split())[:REASON_CHARACTERS].rstrip(".") or type(error).__name__
    return f"The chat template failed{line}: {reason}; change the messages or pass another template."
