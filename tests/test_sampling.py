"""Sampling: exact cuts, ties, seeds and penalties, and agreement with transformers."""

from __future__ import annotations

import json
import math
from collections import Counter

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabulary import write_byte_tokenizer

from mlx_ttd.errors import ConfigError, OptionError
from mlx_ttd.generation import make_processors, make_sampler, read_eos_ids, read_generation_defaults
from mlx_ttd.generation.logprobs import token_logprob
from mlx_ttd.generation.penalties import (
    checked,
    frequency_penalty,
    logit_bias,
    presence_penalty,
    repetition_penalty,
)
from mlx_ttd.generation.sampling import candidates, greedy, most_probable
from mlx_ttd.outputs import ends_of
from mlx_ttd.text import Tokenizer

LOGITS = st.lists(st.floats(-30, 30, width=32) | st.sampled_from([0.0, -0.0, 1.0, -1.0]), min_size=1, max_size=40)


def random_logits(size: int = 1000, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(0, 3, size).astype(np.float32))


@given(LOGITS)
@settings(deadline=None)
def test_greedy_takes_the_lowest_id_of_equal_logits(values):
    token = greedy(mx.array(values, dtype=mx.float32))
    assert token.shape == ()
    assert token.dtype == mx.int32
    assert token.item() == values.index(max(values))


@given(LOGITS, st.integers(0, 50))
@settings(deadline=None)
def test_most_probable_orders_by_logit_then_id(values, count):
    expected = sorted(range(len(values)), key=lambda i: (-values[i], i))
    ids = most_probable(mx.array(values, dtype=mx.float32), count)
    assert ids.tolist() == expected[: count or None]


def test_a_forbidden_token_is_last():
    assert most_probable(mx.array([0.0, -math.inf, 1.0, math.inf])).tolist() == [3, 2, 0, 1]


def kept(values: list[float], **cuts: float) -> list[int]:
    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **cuts}
    ids, scores = candidates(mx.array(values).log(), **options)
    return [token for token, score in zip(ids.tolist(), scores.tolist(), strict=True) if score > -math.inf]


@pytest.mark.parametrize("spread", [0.5, 3.0])
@pytest.mark.parametrize("cuts", [{"top_p": 0.9}, {"min_p": 0.01}, {"top_p": 0.99, "min_p": 1e-4}])
def test_tokens_that_need_not_be_put_in_order_change_no_cut(spread, cuts, monkeypatch):
    logits = random_logits(30_000) * (spread / 3)
    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **cuts}
    found, weights = candidates(logits, **options)
    monkeypatch.setattr("mlx_ttd.generation.sampling.FEW", 30_000)
    ids, scores = candidates(logits, **options)
    kept = mx.sum(scores > -math.inf).item()
    assert mx.sum(weights > -math.inf).item() == kept
    assert mx.array_equal(found[:kept], ids[:kept])
    assert mx.array_equal(weights[:kept], scores[:kept])
    assert len(found) == (256 if kept < 256 else 30_000)


def test_the_cuts():
    values = [0.1, 0.4, 0.2, 0.3]
    assert kept(values) == [1, 3, 2, 0]
    assert kept(values, top_k=2) == [1, 3]
    assert kept(values, top_k=9) == [1, 3, 2, 0]
    assert kept(values, top_p=0.65) == [1, 3]
    assert kept(values, top_p=0.75) == [1, 3, 2]
    assert kept(values, top_p=1e-9) == [1]
    assert kept(values, min_p=0.6) == [1, 3]
    assert kept(values, min_p=1.0) == [1]


def test_top_k_cuts_before_top_p():
    # Of all four, 0.4 alone does not reach 0.5; of the two that top_k leaves, it is 0.57 and does.
    assert kept([0.1, 0.4, 0.2, 0.3], top_p=0.5) == [1, 3]
    assert kept([0.1, 0.4, 0.2, 0.3], top_k=2, top_p=0.5) == [1]


def test_a_seed_repeats_its_draws():
    logits = random_logits()

    def draws(seed: int | None) -> list[int]:
        sampler = make_sampler(1.0, seed=seed)
        return [sampler(logits).item() for _ in range(20)]

    assert draws(7) == draws(7)
    assert draws(7) != draws(8)
    assert draws(None) != draws(None)
    assert len(set(draws((1 << 64) - 1))) > 1


def test_draws_ignore_and_leave_alone_the_global_generator():
    logits = random_logits()
    mx.random.seed(1)
    state = mx.random.state[0].tolist()
    first = make_sampler(1.0, seed=3)(logits).item()
    assert mx.random.state[0].tolist() == state
    mx.random.seed(2)
    assert make_sampler(1.0, seed=3)(logits).item() == first


def test_draws_follow_the_distribution():
    probabilities = [0.5, 0.25, 0.15, 0.1]
    sampler, logits = make_sampler(1.0, seed=0), mx.array(probabilities).log()
    counts = Counter(sampler(logits).item() for _ in range(2000))
    for token, probability in enumerate(probabilities):
        assert abs(counts[token] / 2000 - probability) < 4 * math.sqrt(probability / 2000)


def test_a_tiny_temperature_is_greedy():
    logits = random_logits()
    assert make_sampler(1e-30, seed=0)(logits).item() == greedy(logits).item()
    assert make_sampler(0)(logits).item() == greedy(logits).item()


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1}, {"temperature": math.nan}, {"temperature": math.inf}, {"temperature": "hot"},
        {"top_k": -1}, {"top_k": 1.5}, {"top_p": 0}, {"top_p": 1.1}, {"min_p": -0.1}, {"min_p": 2},
        {"seed": -1}, {"seed": 1 << 64}, {"seed": "x"},
    ],
)  # fmt: skip
def test_numbers_out_of_range_are_refused(options):
    with pytest.raises(OptionError, match=f"^{next(iter(options))} is"):
        make_sampler(**options)


def test_repetition_penalty_pushes_seen_tokens_down():
    logits = mx.array([2.0, -2.0, 2.0, -2.0])
    assert repetition_penalty(2.0)([0, 1, 0], logits).tolist() == [1.0, -4.0, 2.0, -2.0]
    assert logits.tolist() == [2.0, -2.0, 2.0, -2.0]
    assert repetition_penalty(2.0)([], logits).tolist() == logits.tolist()


def test_presence_and_frequency_count_generated_tokens_only():
    logits, tokens = mx.zeros(4), [3, 3, 0, 1, 1]
    assert presence_penalty(0.5, prompt_length=2)(tokens, logits).tolist() == [-0.5, -0.5, 0, 0]
    assert frequency_penalty(0.5, prompt_length=2)(tokens, logits).tolist() == [-0.5, -1.0, 0, 0]
    assert frequency_penalty(0.5, prompt_length=5)(tokens, logits).tolist() == [0, 0, 0, 0]


def test_logit_bias():
    logits = mx.zeros(3)
    assert logit_bias({1: 2.5, 2: -math.inf})([], logits).tolist() == [0, 2.5, -math.inf]
    assert logit_bias({})([], logits).tolist() == [0, 0, 0]
    for bias in ({-1: 1.0}, {"a": 1.0}, {0: math.nan}, {0: math.inf}, {10**12: 1.0}, {0: True}):
        with pytest.raises(OptionError, match="logit_bias"):
            logit_bias(bias)
    with pytest.raises(OptionError, match="token id 3"):
        logit_bias({3: 1.0})([], logits)


def test_a_processor_that_returns_no_logits_is_named():
    logits = mx.zeros(3)
    for found in (None, np.zeros(3, np.float32), logits[None], logits[:2], logits.astype(mx.bfloat16)):

        def spoil(tokens, logits, found=found):
            return found

        with pytest.raises(OptionError, match=r"processor .*spoil returned"):
            checked(spoil)([], logits)
    assert checked(lambda tokens, logits: logits)([], logits) is logits


def test_processors_that_change_nothing_are_left_out():
    assert make_processors() == []
    assert len(make_processors(1.1, 0.1, 0.1, {0: 1.0}, 3)) == 4


def test_log_probabilities():
    logits = random_logits(50)
    exact = np.array(logits, np.float64)
    exact -= np.log(np.exp(exact).sum())
    for token in [*most_probable(logits, 5).tolist(), 0, 49]:
        assert token_logprob(logits, token) == pytest.approx(exact[token], abs=1e-5)


def test_defaults_of_a_model(tmp_path):
    path = tmp_path / "generation_config.json"
    assert read_generation_defaults(tmp_path).temperature == 0
    path.write_text('{"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [3, 1]}')
    found = read_generation_defaults(tmp_path)
    assert (found.temperature, found.top_k, found.top_p, found.eos_ids) == (0.6, 20, 0.95, (3, 1))
    path.write_text('{"do_sample": false, "temperature": 0.6, "eos_token_id": 3}')
    found = read_generation_defaults(tmp_path)
    assert (found.temperature, found.eos_ids) == (0, (3,))


def test_every_config_that_names_an_end_of_text_ends_it(tmp_path):
    assert read_eos_ids(tmp_path) == frozenset()
    (tmp_path / "config.json").write_text('{"eos_token_id": 1, "text_config": {"eos_token_id": [2, 3]}}')
    assert read_eos_ids(tmp_path) == {1, 2, 3}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [4]}')
    assert ends_of(tmp_path, None) == {1, 2, 3, 4}
    write_byte_tokenizer(tmp_path)
    assert ends_of(tmp_path, Tokenizer(tmp_path)) == {1, 2, 3, 4, 256, 258}
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "</think>"}}')
    assert ends_of(tmp_path, Tokenizer(tmp_path)) == {1, 2, 3, 4, 256, 258, 264}
    for text in ('{"eos_token_id": "a"}', '{"text_config": {"eos_token_id": [true]}}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=r"config\.json: eos_token_id is"):
            read_eos_ids(tmp_path)


@pytest.mark.parametrize(
    "field", [{"eos_token_id": "a"}, {"eos_token_id": [-1]}, {"top_k": "many"}, {"top_p": 2}, {"temperature": -1}]
)
def test_malformed_defaults_name_the_field(tmp_path, field):
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": True, **field}))
    with pytest.raises(ConfigError, match=next(iter(field))):
        read_generation_defaults(tmp_path)


@pytest.mark.oracle
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
        {"temperature": 1.5, "top_k": 5},
        {"temperature": 0.7, "top_p": 0.3},
        {"temperature": 1.0, "min_p": 0.05},
        {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
    ],
)
def test_what_may_be_drawn_equals_transformers(options):
    import torch
    from transformers.generation import logits_process as theirs

    logits = random_logits(seed=1)
    scores = torch.tensor(np.array(logits))[None]
    warpers = {
        "temperature": theirs.TemperatureLogitsWarper,
        "top_k": theirs.TopKLogitsWarper,
        "top_p": theirs.TopPLogitsWarper,
        "min_p": theirs.MinPLogitsWarper,
    }
    for name, value in options.items():
        scores = warpers[name](value)(None, scores)
    expected = torch.softmax(scores[0], -1).numpy()
    ids, weights = candidates(logits, **{"top_k": 0, "top_p": 1.0, "min_p": 0.0, **options})
    found = np.zeros_like(expected)
    found[np.array(ids)] = np.array(mx.softmax(weights))
    np.testing.assert_array_equal(found > 0, expected > 0)
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.oracle
def test_repetition_penalty_equals_transformers():
    import torch
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    logits, tokens = random_logits(), [5, 9, 5, 100]
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([tokens]), torch.tensor(np.array(logits))[None])
    np.testing.assert_array_equal(np.array(repetition_penalty(1.3)(tokens, logits)), expected[0].numpy())
