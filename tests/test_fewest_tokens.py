"""A text too long for the context is refused before it is cut into tokens, and one that fits never is."""

from __future__ import annotations

import random
import re
import sys
import unicodedata
from pathlib import Path

import pytest
from fuzz_targets import small_tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers
from vocabulary import write_byte_tokenizer

import mlx_ttd
from mlx_ttd.errors import ContextError
from mlx_ttd.text import fewest_tokens, tokenizer
from mlx_ttd.text.fewest_tokens import COMPOSED, FewestTokens

PROSE = "In the beginning God created the heaven and the earth. "


def backend(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def bytes_only(tmp_path_factory):
    return backend(write_byte_tokenizer(tmp_path_factory.mktemp("bytes")))


def count(found: Tokenizer, text: str) -> int:
    return len(found.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("decomposed", ["NFD", "NFKD"])
def test_no_normalizer_makes_one_byte_of_more_than_four(decomposed):
    """Of what decomposes alike, composed again or not. Hangul's three letters of 3 bytes are not in the table."""
    listed = [c for c in map(chr, range(sys.maxunicode + 1)) if unicodedata.decomposition(c)]
    sources = [(unicodedata.normalize(decomposed, c), len(c.encode())) for c in listed]
    widest: dict[str, int] = {}
    for parts, size in sources:
        if len(parts) == 1:
            widest[parts] = max(size, widest.get(parts, 0))

    def most(parts: str) -> int:
        return sum(widest.get(part, len(part.encode())) for part in parts)

    assert all(size <= most(parts) for parts, size in sources)
    for c in [*listed, *widest]:
        if decomposed == "NFD" or unicodedata.is_normalized("NFKC", c):
            assert most(unicodedata.normalize("NFD", c)) <= COMPOSED * len(c.encode())
    assert most(unicodedata.normalize("NFD", "\u0390")) == (7 if decomposed == "NFD" else 8)


LETTERS = (
    "a",
    "e",
    "K",
    "x",
    " ",
    " ",
    "\n",
    "\u0301",
    "\u0308",
    "\u0327",
    "\u212a",
    "\u1fbe",
    "\u0390",
    "中",
    "\U0001d41a",
    "<|im_start|>",
)


@pytest.mark.parametrize("form", [None, "NFC", "NFD", "NFKC", "NFKD"])
def test_no_text_has_fewer_tokens_than_are_told(bytes_only, form):
    demo = backend(mlx_ttd.demo_path())
    rng = random.Random(form)
    for found in (bytes_only, demo):
        found.normalizer = form and getattr(normalizers, form)()
        fewest = FewestTokens(found)
        for _ in range(150):
            some = rng.sample(LETTERS, rng.randrange(1, 6))
            text = "".join(rng.choice(some) for _ in range(rng.randrange(200)))
            assert fewest(text) <= count(found, text)
        vocabulary = list(found.get_vocab())
        for token in rng.sample(vocabulary, 150):
            text = found.decode([found.token_to_id(token)], skip_special_tokens=False) * 20
            assert fewest(text) <= count(found, text)


def test_what_is_told_of_prose_is_near_the_truth():
    demo = backend(mlx_ttd.demo_path())
    text = PROSE * 1000
    assert count(demo, text) / 4 < FewestTokens(demo)(text)


def changed(found: Tokenizer, **changes) -> Tokenizer:
    again = Tokenizer.from_str(found.to_str())
    for name, value in changes.items():
        setattr(again, name, value)
    return again


def test_a_tokenizer_that_drops_or_joins_what_it_reads_tells_nothing(bytes_only):
    removing = pre_tokenizers.Split(Regex(" "), "removed")
    swallowing = changed(bytes_only)
    swallowing.add_tokens([AddedToken("<x>", rstrip=True)])
    lossy = [
        *(Tokenizer.from_str(text.decode()) for text in small_tokenizers()),
        changed(bytes_only, normalizer=normalizers.Strip()),
        changed(bytes_only, normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Replace("a", "")])),
        changed(bytes_only, pre_tokenizer=pre_tokenizers.Sequence([removing, pre_tokenizers.ByteLevel()])),
        changed(bytes_only, pre_tokenizer=pre_tokenizers.Whitespace()),
        swallowing,
    ]
    for found in lossy:
        assert FewestTokens(found)("a b" * 10_000) == 0
    assert FewestTokens(changed(bytes_only))("a b" * 10_000) > 0


@pytest.fixture(scope="module")
def llm():
    with mlx_ttd.load("demo", "150MB", context=512) as found:
        yield found


@pytest.mark.parametrize(
    "ask",
    [
        lambda llm, text: llm.generate(text),
        lambda llm, text: next(llm.stream(text)),
        lambda llm, text: llm.generate([{"role": "user", "content": text}]),
        lambda llm, text: llm.score("And", text),
        lambda llm, text: llm.score(text, "And"),
        lambda llm, text: llm.score([{"role": "user", "content": "And"}], text),
        lambda llm, text: llm.encode(text * 20),
        lambda llm, text: llm.encode([{"role": "user", "content": text * 10}]),
    ],
)
def test_a_long_text_is_refused_before_it_is_cut_into_tokens(llm, monkeypatch, ask):
    monkeypatch.setattr(tokenizer.Tokenizer, "encode", lambda self, text: pytest.fail("it was cut into tokens"))
    with pytest.raises(ContextError, match=r"^the prompt has at least [\d,]+ tokens and .*; .*shorten it.*\.$"):
        ask(llm, PROSE * 20_000)


def test_the_longest_text_that_fits_is_taken(monkeypatch):
    monkeypatch.setattr(tokenizer, "SHORT_TEXT", 0)
    with mlx_ttd.load("demo", "150MB", context=64) as llm:
        longest = llm.tokenizer.decode([max(range(2048), key=lambda i: len(llm.tokenizer.decode([i])))])
        text = longest * 64
        assert len(llm.tokenizer.encode(text)) == 64
        assert llm.generate(text, max_tokens=1).prompt_tokens == 64
        assert len(llm.score(text, longest).tokens) == 1
        with pytest.raises(ContextError, match="the prompt has at least 65 tokens and memory is reserved for 64"):
            llm.generate(text + longest, max_tokens=1)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="not run: reads /proc")
def test_refusing_a_megabyte_takes_a_few(llm):
    text = (PROSE * 20_000)[: 1 << 20]
    llm.generate("And", max_tokens=1)
    status = Path("/proc/self/status")

    def size(key: str) -> int:
        return int(re.search(rf"{key}:\s*(\d+)", status.read_text())[1]) * 1024

    fewest_tokens.FewestTokens(llm.tokenizer._backend)
    Path("/proc/self/clear_refs").write_text("5")
    before = size("VmRSS")
    with pytest.raises(ContextError):
        llm.generate(text)
    assert size("VmHWM") - before < 10e6
