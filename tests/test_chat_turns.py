"""A second chat turn reads only its new tokens, through the template, whatever tokens the answer was sampled in."""

from __future__ import annotations

import pytest

import mlx_ttd
from mlx_ttd import cli

QUESTION, MORE = {"role": "user", "content": "Genesis 1:1"}, {"role": "user", "content": "And then?"}


@pytest.fixture(scope="module")
def llm():
    with mlx_ttd.load("demo", "300MB", slots=6) as loaded:
        yield loaded


def turn(llm, messages, **options):
    """The response, and how many tokens passed through the model for it."""
    before = llm.stats().counters
    response = llm.generate(messages, **options)
    counts = llm.stats().counters.since(before)
    return response, counts.prefill_tokens + counts.decode_steps


def answered(response):
    return {"role": "assistant", "content": response.text, "reasoning_content": response.reasoning}


@pytest.mark.parametrize("thinking", [False, True])
def test_a_second_turn_reads_only_its_new_tokens(llm, thinking):
    llm._running = None
    options = {"max_tokens": 12, "template": {"enable_thinking": thinking}}
    first, read = turn(llm, [QUESTION], **options)
    # The last sampled token has not been through the model yet.
    assert read == first.prompt_tokens + len(first.tokens) - 1
    messages = [QUESTION, answered(first), MORE]
    second, read = turn(llm, messages, **options)
    assert second.cached_tokens == first.prompt_tokens + len(first.tokens) - 1
    assert read == second.prompt_tokens - second.cached_tokens + len(second.tokens) - 1
    assert second.prompt_tokens - second.cached_tokens < 30
    third, _ = turn(llm, [*messages, answered(second), MORE], **options)
    assert third.cached_tokens == second.prompt_tokens + len(second.tokens) - 1


def test_an_answer_in_unusual_tokens_is_continued_as_it_was_sampled(llm):
    llm._running = None
    letters = [llm.tokenizer.token_id(letter) for letter in "begin"]
    assert letters != llm.tokenizer.encode("begin")
    first = llm.generate([QUESTION], force=letters)
    assert first.text == "begin"
    second, _ = turn(llm, [QUESTION, answered(first), MORE], max_tokens=4)
    assert second.cached_tokens == first.prompt_tokens + len(letters) - 1


def test_another_history_starts_anew(llm):
    llm._running = None
    llm.generate([QUESTION], max_tokens=6)
    other = llm.generate([QUESTION, {"role": "assistant", "content": "No."}, MORE], max_tokens=4)
    assert other.cached_tokens == 0


def test_the_command_line_reads_only_new_tokens(monkeypatch, capsys):
    seen = []
    report = cli._report
    monkeypatch.setattr(cli, "_report", lambda llm: (seen.append(llm.stats().counters), report(llm)))
    lines = iter(["Genesis 1:1\n", "And then?\n", "\n"])
    monkeypatch.setattr("sys.stdin.readline", lambda: next(lines), raising=False)
    cli.chat(max_tokens=6, memory="300MB", seed=3)
    assert capsys.readouterr().out.strip()
    with mlx_ttd.load("demo", "300MB") as llm:
        whole = len(llm.encode([QUESTION, {"role": "assistant", "content": ""}, MORE]))
    assert seen[0].prefill_tokens + seen[0].decode_steps <= whole + 2 * 6 + 4
