"""Tool calls in generated text: Qwen3.5's XML and the older JSON, with arguments typed by the tool's schema."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .tagged import Piece, TagSplitter
from .xml_calls import Call, xml_calls

START, END = "<tool_call>", "</tool_call>"
ToolCall = dict[str, Any]
Tools = Sequence[Mapping[str, Any]]

SOMETHING = re.compile(r"\S")
JSON = json.JSONDecoder(strict=False)
NOT_JSON = object()


def parse_tool_calls(text: str, tools: Tools | None = None) -> tuple[str, list[ToolCall]]:
    """`text` without its tool calls, and the calls as {"name": str, "arguments": dict}.

    A block that cannot be understood, or is cut off, stays in the text. See `ToolCallSplitter` for a stream.
    """
    splitter = ToolCallSplitter(tools)
    content, calls = splitter.feed(text)
    return content + splitter.finish(), calls


class ToolCallSplitter:
    """Takes <tool_call> blocks out of generated text. tools: the JSON schemas that the prompt offered, for types."""

    def __init__(self, tools: Tools | None = None):
        self._schemas = parameter_schemas(tools or ())
        self._tags = TagSplitter(START, END)
        self._block = ""

    def feed(self, text: str) -> tuple[str, list[ToolCall]]:
        """The text outside of calls that `text` settles, and the calls that it completes."""
        return self._take(self._tags.feed(text))

    def finish(self) -> str:
        """What was held back, an unfinished call included."""
        unfinished = self._tags.inside
        rest, _ = self._take(self._tags.finish())
        block, self._block = self._block, ""
        return START + block if unfinished else rest

    def _take(self, pieces: list[Piece]) -> tuple[str, list[ToolCall]]:
        content, calls = "", []
        for piece in pieces:
            if not piece.inside:
                content += piece.text
                continue
            self._block += piece.text
            if piece.closed:
                block, self._block = self._block, ""
                found = parse_block(block, self._schemas)
                calls += found
                if not found:
                    content += START + block + END
        return content, calls


def parameter_schemas(tools: Tools) -> dict[str, Mapping[str, Any]]:
    """Function name to its parameters' JSON schemas, from tools in OpenAI's form, wrapped in "function" or bare."""
    found = {}
    for tool in tools:
        function = tool.get("function", tool)
        parameters = function.get("parameters") or {}
        found[str(function.get("name"))] = parameters.get("properties") or {}
    return found


def parse_block(block: str, schemas: Mapping[str, Mapping[str, Any]]) -> list[ToolCall]:
    """The calls that the inside of one <tool_call> block spells, none where any part of it cannot be understood."""
    found = xml_calls(block) if block.lstrip().startswith("<") else json_calls(block)
    calls = []
    for name, arguments in found:
        types = schemas.get(name, {})
        given = {
            key: typed(value, types[key]) if isinstance(value, str) and isinstance(types.get(key), Mapping) else value
            for key, value in arguments.items()
        }
        calls.append({"name": name, "arguments": given})
    return calls


def json_calls(block: str) -> list[Call]:
    """Names and arguments of calls written as JSON objects, one after another or in a list."""
    found = json_values(block)
    if len(found) == 1 and isinstance(found[0], list):
        found = found[0]
    calls = [as_call(value) for value in found]
    return [call for call in calls if call is not None] if None not in calls else []


def as_call(value: Any) -> Call | None:
    """The call that a JSON value is, or None; arguments of null are none."""
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = from_json(arguments or "{}")
    if arguments is None:
        arguments = {}
    return (name, arguments) if isinstance(arguments, dict) else None


def json_values(text: str) -> list[Any]:
    """The JSON values that `text` spells one after another, none where anything else stands between."""
    found = []
    start = SOMETHING.search(text)
    while start is not None:
        try:
            value, at = JSON.raw_decode(text, start.start())
        except (ValueError, RecursionError):
            return []
        found.append(value)
        start = SOMETHING.search(text, at)
    return found


def from_json(text: str) -> Any:
    """The JSON value that `text` spells, or NOT_JSON."""
    try:
        return JSON.decode(text)
    except (ValueError, RecursionError):
        return NOT_JSON


def schema_types(schema: Mapping[str, Any]) -> set[str]:
    """The JSON types that a schema allows; empty when it does not say."""
    listed = schema.get("type", [])
    types = {listed} if isinstance(listed, str) else {name for name in listed if isinstance(name, str)}
    for key in ("anyOf", "oneOf", "allOf"):
        for choice in schema.get(key) or ():
            if isinstance(choice, Mapping):
                types |= schema_types(choice)
    if not types and all(isinstance(value, str) for value in schema.get("enum") or (0,)):
        types = {"string"}
    return types


def is_finite_number(value: Any) -> bool:
    """Whether a JSON value is a number within float64's range."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def typed(text: str, schema: Mapping[str, Any]) -> Any:
    """`text` as the JSON type that `schema` allows; unchanged when it spells none of them."""
    types = schema_types(schema)
    word = text.strip()
    value = from_json(word)
    if "null" in types and word.lower() in ("null", "none"):
        return None
    if "boolean" in types and word.lower() in ("true", "false"):
        return word.lower() == "true"
    if is_finite_number(value):
        if "integer" in types and value == value // 1:
            return int(value)
        if "number" in types:
            return value
    if ("object" in types and isinstance(value, dict)) or ("array" in types and isinstance(value, list)):
        return value
    return text
