"""score() of two texts against lm-eval's loglikelihood of them: the same tokens, wherever these spell the two texts."""

from __future__ import annotations

import random
import unicodedata

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlx_ttd
from mlx_ttd.errors import OptionError
from mlx_ttd.prompts import ids_after

PIECES = (
    "the",
    " LORD",
    "said",
    " ",
    "  ",
    "\n",
    "\n\n",
    "\t",
    "foo",
    "bar",
    "é",
    "漢",
    "👍",
    "1",
    ",",
    "'s",
    "\u00a0",
)
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=2), min_size=1, max_size=6).map("".join)


@pytest.fixture(scope="module")
def llm():
    with mlx_ttd.load("demo", "300MB", slots=6) as loaded:
        yield loaded


def lm_eval_pair(tokenizer, context, continuation):
    """lm-eval's rule: the spaces at the context's end go over, then the whole is cut at the context's token count."""
    while context and context[-1].isspace():
        context, continuation = context[:-1], context[-1] + continuation
    count = len(tokenizer.encode(context))
    return tokenizer.encode(context), tokenizer.encode(context + continuation)[count:]


def ours(tokenizer, context, continuation):
    prompt, after = ids_after(tokenizer, context, continuation, lambda text: None)
    return tokenizer.encode(prompt) if isinstance(prompt, str) else prompt, after


@settings(deadline=None, max_examples=400)
@given(TEXTS.filter(str.strip), TEXTS.filter(bool))
def test_two_texts_are_cut_where_lm_eval_cuts_them_if_that_spells_them(llm, context, continuation):
    tokenizer, text = llm.tokenizer, unicodedata.normalize("NFC", context + continuation)
    before, after = lm_eval_pair(tokenizer, context, continuation)
    found = ours(tokenizer, context, continuation)
    if after and tokenizer.decode([*before, *after]) == text:
        assert found == (before, after)
    else:
        parts = (unicodedata.normalize("NFC", part) for part in (context, continuation))
        assert tokenizer.decode([*found[0], *found[1]]) == "".join(parts)


@pytest.mark.parametrize(
    ("context", "continuation"),
    [
        ("And the LORD", " said"),
        ("And the LORD ", "said"),
        ("And the LORD said \n", "Let there be light"),
        ("In the beginning God  ", " created"),
    ],
)
def test_a_score_is_the_loglikelihood_of_lm_evals_tokens(llm, context, continuation):
    before, after = lm_eval_pair(llm.tokenizer, context, continuation)
    state, wanted = llm.model.make_cache(), []
    ids = [*before, *after]
    for position, token in enumerate(ids[:-1]):
        logits = llm.model(mx.array([[token]]), cache=state)[0, -1]
        if position >= len(before) - 1:
            wanted.append((logits - mx.logsumexp(logits))[ids[position + 1]].item())
    response = llm.score(context, continuation)
    assert response.tokens == after
    np.testing.assert_allclose(response.logprobs, wanted, atol=1e-4)
    assert response.logprobs == llm.score(before, after).logprobs


def test_tokens_that_cross_the_cut_are_not_halved(llm):
    """lm-eval would score what does not spell the text, or nothing at all."""
    tokenizer, generator = llm.tokenizer, random.Random(0)
    words = [word for i in range(300, 2000) if (word := tokenizer.token(i)) and word.isascii() and word.isalpha()]
    context, continuation = "And the LORD said,\n", "Let there be light"
    assert tokenizer.token(ours(tokenizer, context, continuation)[0][-1]) == ",\u010a"
    assert tokenizer.decode([i for ids in lm_eval_pair(tokenizer, context, continuation) for i in ids]) == (
        "And the LORD said,Let there be light"
    )
    crossed = 0
    for word in generator.sample(words, 100):
        at = generator.randrange(1, len(word)) if len(word) > 1 else 1
        found = ours(tokenizer, word[:at], word[at:] or "a")
        assert tokenizer.decode([*found[0], *found[1]]) == word[:at] + (word[at:] or "a")
        crossed += not lm_eval_pair(tokenizer, word[:at], word[at:] or "a")[1]
    assert crossed > 20


def test_what_is_scored_after_spaces_or_messages_or_not_at_all(llm):
    spaces = llm.score("  \n", "And")
    assert spaces.tokens == llm.tokenizer.encode("And")
    question = [{"role": "user", "content": "Genesis 1:1"}]
    assert llm.score(question, "\nIn ").tokens == llm.tokenizer.encode("\nIn ")
    for nothing in ("", [], ()):
        with pytest.raises(OptionError, match="continuation is empty"):
            llm.score("And ", nothing)
