"""What a generation's tokens are as an answer: text, reasoning, tool calls, and what ends it."""

from __future__ import annotations

import pytest

import mlx_ttd
from mlx_ttd.errors import OptionError, TemplateError

QUESTION = {"role": "user", "content": "Genesis 1:1"}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"n": {"type": "integer"}}}}}]


@pytest.fixture(scope="module")
def llm():
    with mlx_ttd.load("demo", "300MB", slots=6) as loaded:
        yield loaded


def answer(llm, text, prompt=(QUESTION,), thinking=False, **options):
    """The response that `text`, in the model's tokens, makes."""
    options.setdefault("template", {"enable_thinking": thinking})
    return llm.generate(list(prompt), force=llm.tokenizer.encode(text), **options)


@pytest.mark.parametrize("thinking", [False, True])
def test_think_tags_within_an_answer_are_text(llm, thinking):
    text = "Models write <think> and </think> around their thoughts."
    response = answer(llm, ("why\n</think>\n\n" if thinking else "") + text, thinking=thinking)
    assert (response.reasoning, response.text) == ("why" if thinking else "", text)


@pytest.mark.parametrize("content", ["What does <think> do?", "<think>", "a <think>\n"])
def test_a_think_tag_in_a_question_opens_no_reasoning(llm, content):
    for role in ("user", "system"):
        response = answer(llm, "It opens.", [{"role": role, "content": content}, QUESTION][: 1 + (role == "system")])
        assert (response.reasoning, response.text) == ("", "It opens.")


def test_an_answer_that_begins_with_its_thoughts_is_split(llm):
    response = answer(llm, "<think>\nwhy\n</think>\n\nSo <think>.")
    assert (response.reasoning, response.text) == ("why", "So <think>.")


def test_a_tool_call_in_reasoning_is_no_call(llm):
    call = '<tool_call>\n{"name": "f", "arguments": {"n": "3"}}\n</tool_call>'
    response = answer(llm, f"or {call}\n</think>\n\n{call}", thinking=True, tools=TOOLS)
    assert response.reasoning == f"or {call}"
    assert (response.text, response.tool_calls) == ("", ({"name": "f", "arguments": {"n": 3}},))


@pytest.mark.parametrize("stop", ["<|im_start|>", ["x", "<|im_start|>"], "<|im_end|>", "<|endoftext|>"])
def test_a_special_token_as_stop_string_stops(llm, stop):
    token = stop if isinstance(stop, str) else stop[-1]
    response = answer(llm, f"Day.{token} Night.", stop=stop)
    assert (response.text, response.finish_reason) == ("Day.", "stop")
    assert response.tokens[-1] == llm.tokenizer.token_id(token)
    assert answer(llm, f"Day.{token} Night.").text == "Day. Night."


def test_a_stop_string_wins_over_ignore_eos_but_the_models_own_end_does_not(llm):
    bias = {llm.tokenizer.token_id("<|im_start|>"): 1e9}
    options = {"max_tokens": 4, "ignore_eos": True, "logit_bias": bias}
    assert len(llm.generate([QUESTION], **options).tokens) == 4
    assert len(llm.generate([QUESTION], stop="<|im_start|>", **options).tokens) == 1


def test_a_stop_string_within_a_tool_call_shows_what_there_was_of_it(llm):
    response = answer(llm, 'a <tool_call>\n{"name": "f", STOP</tool_call>', tools=TOOLS, stop="STOP")
    assert (response.text, response.tool_calls) == ('a <tool_call>\n{"name": "f", ', ())


@pytest.mark.parametrize("text", ["漢字 or 👩‍👩‍👧 end", "é" * 5 + "\n🏳️‍🌈"])
def test_characters_of_many_tokens_come_whole(llm, text):
    tokens = llm.tokenizer.encode(text)
    assert len(tokens) > len(text)
    chunks = list(llm.stream("And", force=tokens))
    assert "".join(chunk.text for chunk in chunks) == text
    assert not any("\ufffd" in chunk.text for chunk in chunks)
    assert answer(llm, text + "!!stop", stop="!!").text == text


def test_tokens_are_a_list_that_a_prompt_can_be_extended_by(llm):
    ids = llm.encode("In the beginning")
    first = llm.generate(ids, max_tokens=5)
    assert type(first.tokens) is list
    again = llm.generate(ids + first.tokens, max_tokens=2)
    assert again.prompt_tokens == len(ids) + 5
    first.tokens.append(0)
    assert len(llm.last_response.tokens) == 2


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([QUESTION, {"role": "system", "content": "Be brief."}], "A system message must come first"),
        ([QUESTION, {"role": "developer", "content": "Be brief."}], "Unknown role: developer"),
    ],
)
def test_messages_that_the_template_refuses_are_refused_with_its_words(llm, messages, reason):
    for ask in (llm.generate, llm.encode, lambda messages: list(llm.stream(messages))):
        with pytest.raises(TemplateError, match=f"^The chat template failed: {reason}; change the messages"):
            ask(messages)
    assert llm.generate([QUESTION], max_tokens=1).tokens


def test_a_late_system_message_is_put_where_the_template_puts_it(llm):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    late = [QUESTION, {"role": "system", "content": "Be brief."}]
    assert llm.encode(late, template=template) == llm.encode("user: Genesis 1:1\nsystem: Be brief.\n")


def test_the_tokenizer_has_the_names_that_other_programs_use(llm):
    tokenizer = llm.tokenizer
    assert tokenizer.encode("And", add_special_tokens=True) == tokenizer.encode("And")
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.eos_token_id) == (None, "<|im_end|>", 2043)
    assert tokenizer.get_vocab()["<|im_end|>"] == tokenizer.convert_tokens_to_ids("<|im_end|>") == 2043
    assert tokenizer.convert_tokens_to_ids(["!", "none of it"]) == [0, None]
    assert (tokenizer.convert_ids_to_tokens(0), tokenizer.convert_ids_to_tokens([0, 99_999])) == ("!", ["!", None])
    assert tokenizer.chat_template == tokenizer.templates["default"]
    question = [QUESTION]
    assert tokenizer.apply_chat_template(question) == llm.encode(question, add_generation_prompt=False)
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True, enable_thinking=True)
    assert text.endswith("<think>\n")
    assert tokenizer.apply_chat_template(question, tokenize=False, chat_template="{{ messages[0].role }}") == "user"
    with pytest.raises(OptionError, match="has no return_tensors"):
        tokenizer.apply_chat_template(question, return_tensors="np")
