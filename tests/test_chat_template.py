"""Chat templates: what they are given, where they are found, and that an untrusted one cannot do harm."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import datetime

import pytest
from vocabulary import TEMPLATE, write_byte_tokenizer

from mlx_ttd.errors import TemplateError
from mlx_ttd.text import Limits, Tokenizer, normalise_messages, read_templates, render

USER = [{"role": "user", "content": "Hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Now <b>'ünder'</b> & later",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}


def rendered(template: str, messages=USER, **options) -> str:
    return render({"default": template}, messages, **options)


def test_a_conversation_with_thinking_on_and_off():
    template = TEMPLATE.read_text()
    on = rendered(template, variables={"enable_thinking": True})
    assert on == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert rendered(template, variables={"enable_thinking": False}) == on + "\n</think>\n\n"
    assert rendered(template, add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


@pytest.mark.parametrize("arguments", [{"city": "Zürich", "days": 3}, '{"city": "Zürich", "days": 3}'])
def test_tool_call_arguments_may_be_a_dict_or_its_json(arguments):
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sunny"},
    ]
    text = rendered(TEMPLATE.read_text(), messages, tools=[WEATHER])
    assert "<function=weather>\n<parameter=city>\nZürich\n</parameter>\n<parameter=days>\n3\n</parameter>" in text
    assert json.dumps(WEATHER, ensure_ascii=False) in text
    assert "user\n<tool_response>\nsunny\n</tool_response><|im_end|>" in text
    assert call["function"]["arguments"] == arguments


def called(arguments):
    """A conversation with a call of `weather` in its history."""
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [*USER, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "sunny"}]


@pytest.mark.parametrize("arguments", [None, "", "null", "{}", {}])
def test_a_call_without_arguments_has_none_for_the_template(arguments):
    assert "<function=weather>\n</function>" in rendered(TEMPLATE.read_text(), called(arguments))


@pytest.mark.parametrize(
    ("arguments", "form"),
    [
        ([1], "of type list"),
        ("[1]", "of type list"),
        ("3", "of type int"),
        (False, "of type bool"),
        ("{city: Paris}", "no JSON"),
        ('{"a": ', "no JSON"),
        ("[" * 100_000, "no JSON"),
    ],
)
def test_arguments_that_are_no_object_are_refused_where_they_stand(arguments, form):
    with pytest.raises(TemplateError, match=f"^Message 1: the arguments of its call of 'weather' are {form}; pass"):
        rendered(TEMPLATE.read_text(), called(arguments))


@pytest.mark.parametrize("calls", [3, "f", {"name": "f"}, ["f"], [None]])
def test_tool_calls_that_are_no_list_of_dicts_are_refused(calls):
    with pytest.raises(TemplateError, match="Message 1: tool_calls must be a list"):
        rendered(TEMPLATE.read_text(), [*USER, {"role": "assistant", "tool_calls": calls}])


@pytest.mark.parametrize("role", ["user", "tool", "assistant"])
def test_text_parts_reach_a_template_that_knows_none(role):
    parts = [{"type": "text", "text": "sun"}, {"type": "text", "text": "ny"}]
    template = "{{ messages[-1].content if messages[-1].content is string }}"
    assert rendered(template, [*USER, {"role": role, "content": parts}]) == "sunny"
    assert rendered(template, [*USER, {"role": role, "content": []}]) == ""
    for nothing in ("", None):
        assert rendered(template, [*USER, {"role": role, "content": nothing}]) == ""


@pytest.mark.parametrize("content", [{"degrees": 20}, 3, ["sunny"], [["sunny"]]])
def test_content_that_is_neither_text_nor_parts_is_refused(content):
    with pytest.raises(TemplateError, match=r"^Message 1 has a content of type .*; pass a text, or parts"):
        rendered(TEMPLATE.read_text(), [*USER, {"role": "tool", "content": content}])


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_reaches_the_template_by_any_of_its_names(name):
    messages = [*USER, {"role": "assistant", "content": "yes", name: "because"}]
    assert "<think>\nbecause\n</think>\n\nyes" in rendered(TEMPLATE.read_text(), messages)


def test_documents_and_any_variable_reach_the_template():
    text = rendered(
        "{{ documents[0].text }} {{ shade }} {{ tools }}", documents=[{"text": "D"}], variables={"shade": "blue"}
    )
    assert text == "D blue None"


def test_message_objects_become_plain_dicts():
    @dataclass
    class Message:
        role: str
        content: str
        name: str | None = None

    assert normalise_messages([Message("user", "Hi")]) == USER
    with pytest.raises(TemplateError, match="holds a bytes"):
        normalise_messages([{"role": "user", "content": b"Hi"}])


@pytest.mark.parametrize("messages", [[], "Hi", {"role": "user"}, [{"content": "Hi"}], ["Hi"], [{"role": 3}]])
def test_what_is_no_conversation_is_refused(messages):
    with pytest.raises(TemplateError, match="role"):
        normalise_messages(messages)


def test_json_and_dates_as_transformers_gives_them():
    assert rendered('{{ {"a": "<é>"} | tojson }}') == '{"a": "<é>"}'
    assert rendered('{{ {"b": 1, "a": 2} | tojson(indent=1, sort_keys=true) }}') == '{\n "a": 2,\n "b": 1\n}'
    assert rendered("{{ strftime_now('%Y') }}") == datetime.now().strftime("%Y")
    assert rendered("  {% generation %}\nx{% endgeneration %}") == "x"


def test_where_templates_are_found(tmp_path):
    assert read_templates(tmp_path, {}) == {}
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    assert read_templates(tmp_path, {"chat_template": "x"}) == {"default": "x"}
    assert read_templates(tmp_path, {"chat_template": named}) == {"default": "d", "tool_use": "t"}
    (tmp_path / "chat_template.jinja").write_text("file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("more")
    assert read_templates(tmp_path, {"chat_template": "x"}) == {"default": "file", "rag": "more"}


def test_additional_templates_join_those_of_the_tokenizer_config(tmp_path):
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("t")
    found = read_templates(tmp_path, {"chat_template": "d"})
    assert found == {"default": "d", "tool_use": "t"}
    assert render(found, USER, tools=[WEATHER]) == "t"
    assert render(found, USER) == "d"


def test_chat_template_json_is_read_where_nothing_else_holds_a_template(tmp_path):
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    for value, wanted in (
        ("j", {"default": "j"}),
        (named, {"default": "d", "tool_use": "t"}),
        ({"rag": "r"}, {"rag": "r"}),
    ):
        (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": value}))
        assert read_templates(tmp_path, {}) == wanted
        assert read_templates(tmp_path, {"chat_template": "x"}) == {"default": "x"}
    for damaged in ("[]", '{"chat_template": 3}', "{"):
        (tmp_path / "chat_template.json").write_text(damaged)
        with pytest.raises(TemplateError, match=r"chat_template\.json"):
            read_templates(tmp_path, {})


def test_a_template_is_named_by_either_parameter(tmp_path):
    write_byte_tokenizer(tmp_path)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("r")
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.render_chat(USER, template="rag") == tokenizer.render_chat(USER, chat_template="rag") == "r"
    assert tokenizer.encode_chat(USER, chat_template="rag") == [ord("r")]
    assert tokenizer.render_chat(USER, chat_template="{{ messages[0].content }}") == "Hi"


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ({"content": [{"type": "text", "text": "What is this?"}, {"type": "image", "url": "a.png"}]}, "an image"),
        ({"content": [{"type": "image_url", "image_url": {"url": "a.png"}}]}, "an image"),
        ({"content": [{"image": "a.png"}]}, "an image"),
        ({"content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]}, "an audio"),
        ({"content": [{"type": "video", "video": "a.mp4"}]}, "a video"),
        ({"content": [{"type": "file", "file": {"file_id": "1"}}]}, "a file"),
        ({"content": {"type": "image", "url": "a.png"}}, "an image"),
        ({"content": "What is this?", "images": ["aGk="]}, "an image"),
        ({"content": None, "audio": {"id": "1"}}, "an audio"),
    ],
)
@pytest.mark.parametrize("role", ["user", "tool"])
def test_what_is_no_text_is_refused_and_not_dropped(message, kind, role):
    with pytest.raises(TemplateError, match=rf"Message 1 holds {kind}, and the model is given text alone"):
        normalise_messages([*USER, {"role": role, **message}])


def test_parts_of_text_are_no_attachment():
    message = {"role": "user", "content": [{"type": "text", "text": "an image", "image": None}], "images": []}
    assert normalise_messages([message]) == [{**message, "content": "an image"}]


@pytest.mark.parametrize("listed", [3, ["x"], [{"name": "a"}], [{"name": "a", "template": 3}]])
def test_a_malformed_template_entry_is_refused(tmp_path, listed):
    with pytest.raises(TemplateError, match=r"tokenizer_config\.json"):
        read_templates(tmp_path, {"chat_template": listed})


def test_which_template_is_used():
    both = {"default": "d", "tool_use": "t", "rag": "r"}
    assert render(both, USER) == "d"
    assert render(both, USER, tools=[WEATHER]) == "t"
    assert render(both, USER, template="rag") == "r"
    assert render(both, USER, template="{{ messages[0].content }}") == "Hi"
    with pytest.raises(TemplateError, match="default, rag, tool_use"):
        render(both, USER, template="other")
    with pytest.raises(TemplateError, match="name one of rag"):
        render({"rag": "r"}, USER)
    with pytest.raises(TemplateError, match="has no chat template"):
        render({}, USER)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('no\nway') }}", "no way"),
        ("{% for %}", "line 1"),
        ("{{ missing.name }}", "'missing' is undefined"),
        ("{{ messages[0].content + 1 }}", "concatenate"),
        ("{% include 'x' %}", "loader"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "chat template"),
        ("x" * 1_000_001, "longer than"),
    ],
)
def test_a_template_that_fails_is_one_sentence(template, reason):
    with pytest.raises(TemplateError, match=reason) as caught:
        rendered(template)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(a=1) }}",
    ],
)
def test_a_template_cannot_reach_python_or_change_its_input(template):
    messages = [dict(USER[0])]
    with pytest.raises(TemplateError, match="unsafe"):
        rendered(template, messages)
    assert messages == USER
    assert rendered("{{ '{0.__class__}'.format(messages) }}") == ""


DOUBLING = "{%% set ns = namespace(s='aaaa', n=3, l=[1]) %%}{%% for i in range(60) %%}%s{%% endfor %%}%s"


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{{ range(10000000000) | list }}",
        "{{ 'a' * 10**12 }}",
        "{{ [1] * 10**12 }}",
        "{{ 9 ** (9 ** 9) }}",
        DOUBLING % ("{% set ns.s = ns.s ~ ns.s %}", ""),
        DOUBLING % ("{% set ns.s = ns.s + ns.s %}", ""),
        DOUBLING % ("{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}", ""),
        DOUBLING % ("{% set ns.n = ns.n * ns.n %}", ""),
        DOUBLING % ("{% set ns.l = [ns.l, ns.l] %}", "{{ ns.l }}"),
        DOUBLING % ("{% set ns.l = [ns.l, ns.l] %}", "{% set x = ns.l | tojson %}"),
        "{{ 'a'.center(10**10) }}",
        "{{ 'a' | center(10**10) }}",
        "{{ 'a' | indent(10**10, first=true) }}",
        "{{ [1] | tojson(indent=10**10) }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ '%*d' % (10**10, 1) }}",
        "{{ '%9999999999s' | format('a') }}",
        "{{ '{:>9999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10**10) }}",
        "{{ strftime_now('%9999999999d') }}",
        "{{ range(100000) | join('a' * 10000) }}",
        "{{ ('a' * 10000).join(range(100000) | map('string')) }}",
        "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
        "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) }}",
        "{{ range(100000) | map('replace', '1', 'b' * 100000) | list | length }}",
        "{{ ('a' * 1000000) | replace(new='b' * 1000000, old='a') }}",
        "{{ range(100000) | join(attribute='real', d='a' * 10000) }}",
        "{{ lipsum(n=100000) }}",
        "{% for a in range(100000) %}" + "text " * 1000 + "{% endfor %}",
        "{% set x %}{% for a in range(100000) %}" + "text " * 1000 + "{% endfor %}{% endset %}",
        "{% for a in range(100000) %}{{ '" + "text " * 1000 + "' }}{% endfor %}",
        "{% for a in range(100000) %}{{ '" + "text " * 1000 + "' | replace('t', 'tttt') }}{% endfor %}",
    ],
)
def test_a_template_cannot_take_unbounded_time_or_text(template):
    begun = time.monotonic()
    with pytest.raises(TemplateError):
        rendered(template, limits=Limits(characters=2_000_000, seconds=0.5))
    assert time.monotonic() - begun < 5


def test_the_letters_of_a_text_that_is_joined_are_not_looked_at_one_by_one():
    begun = time.process_time()
    with pytest.raises(TemplateError, match="more than 16,000,000 characters"):
        rendered("{{ ('x' * 8000000).join('y' * 8000000) }}")
    assert time.process_time() - begun < 1
    assert rendered("{{ '-'.join('abc') }}{{ 'abc' | join('-') }}") == "a-b-ca-b-c"


def test_text_up_to_the_limit_passes():
    limits = Limits(characters=1000)
    assert len(rendered("{{ 'a' * 1000 }}", limits=limits)) == 1000
    with pytest.raises(TemplateError, match="more than 1,000 characters"):
        rendered("{{ 'a' * 1000 }}{{ 'b' }}", limits=limits)


def test_neither_library_is_imported_before_text_is_needed():
    program = (
        "import sys; from mlx_ttd.text import Tokenizer; Tokenizer('.');"
        "print({'jinja2', 'tokenizers'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.stdout.strip() == "set()", run.stderr


def test_special_tokens_reach_the_template(tmp_path):
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "{{ bos_token }}{{ eos_token }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer(tmp_path).render_chat(USER) == "<s></s>"
    assert Tokenizer(tmp_path).render_chat(USER, bos_token="!") == "!</s>"
