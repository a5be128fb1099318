"""Tool calls as Qwen3.5 writes them: <function=NAME>, then <parameter=KEY>, a value and </parameter> for each."""

from __future__ import annotations

import re
from typing import Any

Call = tuple[str, dict[str, Any]]

FUNCTION = re.compile(r"\s*<function=\s*([^>\n]+?)\s*>\s*")
PARAMETER = re.compile(r"<parameter=\s*([^>\n]+?)\s*>")
END_FUNCTION = re.compile(r"\s*(?:</function>)?")
NEXT_FUNCTION = r"<function=[^>\n]+>"
NEXT = rf"(?:<parameter=[^>\n]+>|{NEXT_FUNCTION}|</function>\s*(?:{NEXT_FUNCTION}|\Z))"
CLOSED = re.compile(rf"</parameter>\s*(?={NEXT}|\Z)")
# A forgotten </parameter> is only told from text where the next tag begins a line, as the format has it.
UNCLOSED = re.compile(rf"(?<=\n)[ \t]*(?={NEXT})")


def xml_calls(block: str) -> list[Call]:
    """Name and arguments, as they are written, of every function; none where anything else stands between."""
    calls, at = [], 0
    while function := FUNCTION.match(block, at):
        at, arguments = function.end(), {}
        while parameter := PARAMETER.match(block, at):
            end = value_end(block, parameter.end())
            if end is None:
                return []
            value, at = block[parameter.end() : end.start()], end.end()
            arguments[parameter[1]] = value.removeprefix("\n").removesuffix("\n")
        calls.append((function[1], arguments))
        if end_function := END_FUNCTION.match(block, at):
            at = end_function.end()
    # What is left over was meant as something; better to show it than to call without it.
    return [] if block[at:].strip() else calls


def value_end(block: str, start: int) -> re.Match[str] | None:
    """What ends the value that begins at `start`: </parameter>, or the next tag where that was forgotten; or None.

    A value may hold these tags itself: it ends where a tag follows, and where every parameter that it opens is closed.
    """
    closed = CLOSED.search(block, start)
    stop = len(block) if closed is None else closed.start()
    if closed is not None and block.count("<parameter=", start, stop) <= block.count("</parameter>", start, stop):
        return closed
    if not block.startswith("\n", start):
        return None
    unclosed = UNCLOSED.search(block, start)
    return unclosed if unclosed is not None and unclosed.start() < stop else closed
