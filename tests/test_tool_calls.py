"""Tool calls in both forms, typed by the tool's schema; what is no call stays text."""

from __future__ import annotations

import time
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


FORGOTTEN = {
    "before the next": "<function=f>\n<parameter=count>\n3\n<parameter=text>\n4\n</parameter>\n</function>",
    "of the last": "<function=f>\n<parameter=count>\n3\n</parameter>\n<parameter=text>\n4\n</function>",
    "of both": "<function=f>\n<parameter=count>\n3\n  <parameter=text>\n4\n</function>\n",
    "and of the function": "<function=f>\n<parameter=count>\n3\n<parameter=text>\n4\n</parameter>",
}


@pytest.mark.parametrize("block", FORGOTTEN.values(), ids=FORGOTTEN)
def test_a_forgotten_closing_tag_swallows_no_argument(block):
    content, calls = parse_tool_calls(f"<tool_call>\n{block}\n</tool_call>", TOOLS)
    assert (content, calls) == ("", [{"name": "f", "arguments": {"count": 3, "text": "4"}}])


@pytest.mark.parametrize(
    "block",
    [
        "<function=f>\n<parameter=count>\n1\n</parameter>\n</function>\n<function=g>\n<parameter=a>\n2\n</parameter>\n</function>",
        "<function=f><parameter=count>1</parameter></function><function=g><parameter=a>2</parameter></function>",
        "<function=f>\n<parameter=count>\n1\n</parameter>\n<function=g>\n<parameter=a>\n2\n</parameter>",
        "<function=f>\n<parameter=count>\n1\n</function>\n<function=g>\n<parameter=a>\n2\n</parameter>\n</function>",
        '{"name": "f", "arguments": {"count": 1}}\n{"name": "g", "arguments": {"a": "2"}}',
        '[{"name": "f", "arguments": {"count": "1"}}, {"name": "g", "arguments": {"a": "2"}}]',
    ],
)
def test_two_functions_in_one_block_are_two_calls(block):
    wanted = [{"name": "f", "arguments": {"count": 1}}, {"name": "g", "arguments": {"a": "2"}}]
    assert parse_tool_calls(f"a<tool_call>\n{block}\n</tool_call>b", TOOLS) == ("ab", wanted)


@pytest.mark.parametrize(
    "value",
    [
        "use <parameter=key> to open",
        "<function=g>\n<parameter=a>\n1\n</parameter>\n</function>",
        "a\n<parameter=b>\n1\n</parameter>\nc",
        "</function>\nand more",
        "\n\n",
    ],
)
def test_a_value_may_speak_of_the_format(value):
    for arguments in ({"text": value}, {"text": value, "count": "3"}, {"count": "3", "text": value}):
        (call,) = parse_tool_calls(xml(**arguments), TOOLS)[1]
        assert call["arguments"]["text"] == value
        assert call["arguments"].keys() == arguments.keys()


@pytest.mark.parametrize("arguments", ["null", '"null"', '""', "{}"])
def test_a_json_call_may_have_no_arguments(arguments):
    block = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert parse_tool_calls(block)[1] == [{"name": "f", "arguments": {}}]


@pytest.mark.parametrize(
    "block",
    [
        "<function=f>" + "\n<parameter=a>\n1" * 3000 + "\n</parameter>\n</function>",
        "<function=f><parameter=a>" + "\n" * 50_000,
        "<function=f><parameter=a>" + "</parameter>x" * 4000,
        "<function=f></function>" * 3000,
        "{}" * 30_000,
    ],
)
def test_a_block_of_any_shape_is_read_at_once(block):
    begun = time.process_time()
    parse_tool_calls(f"<tool_call>{block}</tool_call>")
    assert time.process_time() - begun < 2


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>what?</tool_call>",
        '<tool_call>{"name": "f", "arguments": {}} and {"name": "g", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}}{"name": "g", "arguments": [1]}</tool_call>',
        "<tool_call><function=f></function><function=g>stray</function></tool_call>",
        "<tool_call><function=f><parameter=a><parameter=b>1</parameter></function></tool_call>",
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
