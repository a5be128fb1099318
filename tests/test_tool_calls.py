"""Tool calls in both forms, typed by the tool's schema; what is no call stays text."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_ttd.text import ToolCallSplitter, parse_tool_calls

PROPERTIES = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "ratio": {"type": "number"},
    "flag": {"type": "boolean"},
    "items": {"type": "array"},
    "map": {"type": "object"},
    "maybe": {"type": ["integer", "null"]},
    "either": {"anyOf": [{"type": "number"}, {"type": "string"}]},
    "choice": {"enum": ["1", "2"]},
    "unsaid": {},
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": PROPERTIES}}}]


def xml(**arguments: str) -> str:
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("text", "12", "12"),
        ("text", "true", "true"),
        ("text", " two\nlines \n", " two\nlines \n"),
        ("text", "if a < b:\n\treturn '</parameter>'", "if a < b:\n\treturn '</parameter>'"),
        ("count", "12", 12),
        ("count", "12.0", 12),
        ("count", "12.5", "12.5"),
        ("count", "many", "many"),
        ("count", "9" * 400, "9" * 400),
        ("ratio", "-1e-3", -0.001),
        ("ratio", "NaN", "NaN"),
        ("ratio", "-" + "9" * 400, "-" + "9" * 400),
        ("flag", "True", True),
        ("flag", "false", False),
        ("flag", "yes", "yes"),
        ("items", "[1, 2.5, {}]", [1, 2.5, {}]),
        ("map", '{"a": [null]}', {"a": [None]}),
        ("map", "[1]", "[1]"),
        ("map", "{broken", "{broken"),
        ("maybe", "null", None),
        ("maybe", "7", 7),
        ("either", "7", 7),
        ("either", "seven", "seven"),
        ("choice", "1", "1"),
        ("unsaid", "7", "7"),
        ("unknown", "7", "7"),
    ],
)
def test_arguments_are_typed_by_the_schema(name, text, value):
    content, calls = parse_tool_calls(xml(**{name: text}), TOOLS)
    assert content == ""
    assert calls == [{"name": "f", "arguments": {name: value}}]
    assert type(calls[0]["arguments"][name]) is type(value)


def test_json_calls_and_text_around_them():
    text = (
        'before <tool_call>\n{"name": "f", "arguments": {"count": "3", "text": "4"}}\n</tool_call>'
        '<tool_call>{"name": "g", "arguments": "{\\"a\\": 1}"}</tool_call> after'
    )
    content, calls = parse_tool_calls(text, TOOLS)
    assert content == "before  after"
    assert calls == [
        {"name": "f", "arguments": {"count": 3, "text": "4"}},
        {"name": "g", "arguments": {"a": 1}},
    ]


def test_a_call_without_arguments_or_without_schemas():
    assert parse_tool_calls("<tool_call><function=now></function></tool_call>")[1] == [{"name": "now", "arguments": {}}]
    assert parse_tool_calls(xml(count="3"))[1][0]["arguments"] == {"count": "3"}
    bare = [{"name": "f", "parameters": {"properties": {"count": {"type": "integer"}}}}]
    assert parse_tool_calls(xml(count="3"), bare)[1][0]["arguments"] == {"count": 3}


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>what?</tool_call>",
        "<tool_call>[1]</tool_call>",
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        "<tool_call><function=f>stray<parameter=a>1</parameter></function></tool_call>",
        "<tool_call><function=f><parameter=a>1</function></tool_call>",
        "<tool_call>\n<function=f>\n<parameter=a>",
        "a <tool_cal",
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
        "",
    ],
)
def test_what_is_no_call_stays_text(text):
    assert parse_tool_calls(text, TOOLS) == (text, [])


@given(st.lists(st.integers(0, 200), max_size=10))
@settings(deadline=None)
def test_a_stream_gives_the_same_calls(cuts):
    text = "a<b " + xml(count="3") + "\n<tool_call>no</tool_call>" + xml(flag="true") + "<tool_call>cut <"
    points = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    splitter, content, calls = ToolCallSplitter(TOOLS), "", []
    for start, stop in pairwise(points):
        piece, found = splitter.feed(text[start:stop])
        content += piece
        calls += found
    assert (content + splitter.finish(), calls) == parse_tool_calls(text, TOOLS)
    assert len(calls) == 2
