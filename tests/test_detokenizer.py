"""Incremental decoding, and splitting at tags, do not depend on where the stream is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from vocabulary import write_byte_tokenizer

from mlx_ttd.text import Detokenizer, ReasoningSplitter, Tokenizer, opens_reasoning


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return Tokenizer(write_byte_tokenizer(tmp_path_factory.mktemp("bytes")))


def streamed(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.add(i) for i in ids), detokenizer.finish()]


@given(st.text())
@settings(deadline=None, max_examples=50)
def test_any_text_streams_whole(tokenizer, text):
    ids = tokenizer.encode(text)
    pieces = streamed(tokenizer.detokenizer(), ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@given(st.lists(st.integers(0, 264 + 3), max_size=60), st.booleans())
@settings(deadline=None)
def test_any_tokens_stream_as_they_decode_at_once(tokenizer, ids, skip):
    assert "".join(streamed(tokenizer.detokenizer(skip), ids)) == tokenizer.decode(ids, skip)


def test_a_character_comes_with_its_last_byte(tokenizer):
    detokenizer = tokenizer.detokenizer()
    assert [detokenizer.add(byte) for byte in "é👍a".encode()] == ["", "é", "", "", "", "👍", "a"]
    assert detokenizer.finish() == ""
    assert [detokenizer.add(0xF0), detokenizer.add(ord("b")), detokenizer.add(0xF0)] == ["", "\ufffdb", ""]
    assert detokenizer.finish() == "\ufffd"


@given(st.lists(st.sampled_from([[0], [1], [2], [3], [4, 5, 6]]), max_size=20))
@settings(deadline=None)
def test_a_decoder_that_strips_the_first_space(pieces):
    words = ["▁Hi", "▁", "you", "!", "<0xE2>", "<0x82>", "<0xAC>"]
    backend = Backend(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    ids = [i for piece in pieces for i in piece]
    assert "".join(streamed(Detokenizer(backend.decode), ids)) == backend.decode(ids)


def split_in(text: str, cuts: list[int], inside: bool) -> tuple[str, str]:
    splitter = ReasoningSplitter(inside)
    points = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    pieces = [splitter.feed(text[a:b]) for a, b in pairwise(points)] + [splitter.finish()]
    return "".join(piece.reasoning for piece in pieces), "".join(piece.text for piece in pieces)


@pytest.mark.parametrize(
    ("text", "inside", "expected"),
    [
        ("<think>\nwhy\n</think>\n\nanswer\n", False, ("why", "answer\n")),
        ("why\n\nnot\n</think>\n\nanswer", True, ("why\n\nnot", "answer")),
        ("\n\nplain </think> <thin", False, ("", "\n\nplain </think> <thin")),
        ("cut off\n", True, ("cut off", "")),
        ("<think></think>", False, ("", "")),
        ("\n <think>b</think>c<think>d</think>e", False, ("b", "c<think>d</think>e")),
        ("a<think>b</think>c", False, ("", "a<think>b</think>c")),
        ("a <think> tag</think>\n\n`<think>` opens", True, ("a <think> tag", "`<think>` opens")),
        ("\n\n", False, ("", "\n\n")),
        ("<think>\n\n</thin", False, ("</thin", "")),
    ],
)
@given(cuts=st.lists(st.integers(0, 100), max_size=10))
def test_reasoning_apart_from_the_answer(text, inside, expected, cuts):
    assert split_in(text, cuts, inside) == expected


@given(st.lists(st.sampled_from(["<think>", "</think>", "\n", "a", "<"]), max_size=12), st.booleans(), st.data())
def test_reasoning_does_not_depend_on_cuts(parts, inside, data):
    text = "".join(parts)
    cuts = data.draw(st.lists(st.integers(0, max(len(text), 1)), max_size=8))
    assert split_in(text, cuts, inside) == split_in(text, [], inside)


def test_text_is_held_back_no_longer_than_needed():
    splitter = ReasoningSplitter()
    assert splitter.feed("\n<thin").text == ""
    assert splitter.feed("g").text == "\n<thing"
    assert splitter.feed("<").text == "<"
    splitter = ReasoningSplitter(inside=True)
    assert splitter.feed("a\n</thin").reasoning == "a"
    assert splitter.feed("g").reasoning == "\n</thing"
    assert splitter.feed("</").reasoning == ""
    assert splitter.finish().reasoning == "</"


def test_whether_a_prompt_opens_reasoning():
    assert opens_reasoning("<|im_start|>assistant\n<think>\n")
    assert not opens_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not opens_reasoning("plain")
    assert not opens_reasoning("<|im_start|>user\nWhat does <think> do?<|im_end|>\n<|im_start|>assistant\n")
