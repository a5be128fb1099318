"""A second chat turn reads only its new tokens, whatever tokens the answer was sampled in and the template drops."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from live import forget

import mlx_ttd
from mlx_ttd import cli
from mlx_ttd.state import RecurrentState

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
    forget(llm)
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
    forget(llm)
    letters = [llm.tokenizer.token_id(letter) for letter in "begin"]
    assert letters != llm.tokenizer.encode("begin")
    first = llm.generate([QUESTION], force=letters)
    assert first.text == "begin"
    second, _ = turn(llm, [QUESTION, answered(first), MORE], max_tokens=4)
    assert second.cached_tokens == first.prompt_tokens + len(letters) - 1


def test_another_answer_goes_on_from_the_question_and_another_question_starts_anew(llm):
    forget(llm)
    llm.generate([QUESTION], max_tokens=6)
    other = llm.generate([QUESTION, {"role": "assistant", "content": "No."}, MORE], max_tokens=4)
    assert other.cached_tokens == len(llm.encode([QUESTION], add_generation_prompt=False))
    assert llm.generate([MORE], max_tokens=4).cached_tokens == 0


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


@pytest.mark.parametrize("terminal", [False, True])
def test_chat_asks_with_a_sign_on_a_terminal_alone(monkeypatch, capsys, terminal):
    lines = iter(["Genesis 1:1\n", "\n"])
    monkeypatch.setattr("sys.stdin.readline", lambda: next(lines), raising=False)
    monkeypatch.setattr("sys.stdin.isatty", lambda: terminal, raising=False)
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal, raising=False)
    cli.chat(max_tokens=2, memory="300MB", quiet=True)
    assert capsys.readouterr().err.count("> ") == 2 * terminal


@pytest.fixture(scope="module")
def forgetful(tmp_path_factory):
    """The demo model with a template that drops reasoning older than the last question."""
    store = tmp_path_factory.mktemp("forgetful") / "store"
    shutil.copytree(mlx_ttd.demo_path(), store)
    shutil.copy(Path(__file__).with_name("qwen_like.jinja"), store / "chat_template.jinja")
    manifest = json.loads((store / "manifest.json").read_text())
    template = (store / "chat_template.jinja").read_bytes()
    manifest["copied"]["chat_template.jinja"] = {"bytes": len(template), "sha256": hashlib.sha256(template).hexdigest()}
    (store / "manifest.json").write_text(json.dumps(manifest))
    return store


@pytest.mark.parametrize("chunk", [0, 256])
def test_turns_whose_reasoning_is_dropped_go_on_from_the_question(forgetful, chunk):
    options = {"max_tokens": 10, "template": {"enable_thinking": True}}
    long = {"role": "user", "content": "In the beginning. " * 60}
    with mlx_ttd.load(forgetful, "300MB", slots=6, prefill_chunk=chunk) as llm:
        messages, question = [long], 0
        for _ in range(3):
            response, read = turn(llm, messages, **options)
            assert response.cached_tokens == question
            assert read == response.prompt_tokens - question + len(response.tokens) - 1
            question = len(llm.encode(messages, **options["template"], add_generation_prompt=False))
            again, read = turn(llm, messages, **options)
            assert (again.cached_tokens, again.digest) == (question, response.digest)
            assert again.logits_digest == response.logits_digest
            messages = [*messages, answered(response), MORE]
        forget(llm)
        whole = llm.generate(llm.encode(messages[:-2], **options["template"]), max_tokens=10)
        assert whole.cached_tokens == 0
        assert (whole.digest, whole.logits_digest) == (response.digest, response.logits_digest)


def test_a_mark_is_held_where_memory_allows_and_counted(forgetful):
    least = mlx_ttd.info(forgetful)["least_bytes"]
    with mlx_ttd.load(forgetful, least) as llm:
        assert llm.ledger.accounts["mark"] == 0
        llm.generate([QUESTION], max_tokens=4)
        assert llm.generate([QUESTION], max_tokens=4).cached_tokens == 0
        llm.set_memory("300MB")
        held = sum(
            layer.nbytes for layer in llm.engine.call(llm._core.model.make_cache) if isinstance(layer, RecurrentState)
        )
        assert llm.ledger.accounts["mark"] == held
        llm.generate([QUESTION], max_tokens=4)
        assert llm.generate([QUESTION], max_tokens=4).cached_tokens > 0
        llm.set_memory(least)
        assert llm.generate([QUESTION], max_tokens=4).cached_tokens == 0
