"""mlx-lm's batches and prompt files on a streamed model: what it cannot do is refused at once, with what to do."""

from __future__ import annotations

import mlx.core as mx
import pytest

import mlx_ttd
from mlx_ttd.errors import KernelError, StateError

SETTING = "one sequence at a time.*set batch_size=1"


@pytest.fixture(scope="module")
def llm():
    with mlx_ttd.load("demo", "300MB", slots=6) as loaded:
        yield loaded


def test_a_batch_of_inputs_is_refused_with_what_to_set(llm):
    """As mlx_lm.perplexity at its batch of 8 asks."""
    with pytest.raises(KernelError, match=f"cannot batch 8.*{SETTING}|{SETTING}"):
        llm.model(mx.zeros((8, 5), mx.int32))


def test_states_are_merged_alone(llm):
    first, second = llm.model.make_cache(), llm.model.make_cache()
    for one, other in zip(first, second, strict=True):
        assert one.merge([one]) is one.extract(0) is one
        one.filter([0])
        with pytest.raises(KernelError, match=SETTING):
            one.merge([one, other])
        with pytest.raises(KernelError, match=SETTING):
            one.extend(other)


@pytest.mark.oracle
def test_mlx_lm_generates_a_batch_one_by_one_or_is_refused_at_once(llm):
    mlx_lm = pytest.importorskip("mlx_lm", reason="needs the oracle extra")
    wrapper = pytest.importorskip("mlx_lm.tokenizer_utils", reason="needs the oracle extra").TokenizerWrapper
    tokenizer = wrapper(llm.tokenizer)
    prompts = [llm.encode(text) for text in ("In the beginning", "And the LORD said unto", "Amen")]
    before = llm.stats().counters
    with pytest.raises(KernelError, match=SETTING):
        mlx_lm.batch_generate(llm.model, tokenizer, prompts, max_tokens=8)
    assert llm.stats().counters == before
    alone = {"prefill_batch_size": 1, "completion_batch_size": 1}
    texts = mlx_lm.batch_generate(llm.model, tokenizer, prompts, max_tokens=8, **alone).texts
    assert texts == [llm.generate(prompt, max_tokens=8).text for prompt in prompts]


@pytest.mark.oracle
def test_mlx_lm_is_refused_when_it_saves_a_prompt_not_when_it_reads_it(llm, tmp_path):
    cache = pytest.importorskip("mlx_lm.models.cache", reason="needs the oracle extra")
    state = llm.model.make_cache()
    llm.model(mx.array([llm.encode("In the beginning")]), cache=state)
    mx.eval([layer.state for layer in state])
    with pytest.raises(StateError, match=r"use llm\.save_state"):
        cache.save_prompt_cache(str(tmp_path / "prompt.safetensors"), state)
    assert list(tmp_path.iterdir()) == []
