"""Logits against transformers in fp32, from stores whose weights transformers gets dequantised."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the oracle extra")
pytest.importorskip("transformers", reason="needs the oracle extra")

import oracle

import mlx_ttd

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

CASES = {
    "moe, fused": {"moe": True, "fused": True},
    "moe, per expert": {"moe": True, "fused": False},
    "moe, tied head": {"moe": True, "fused": True, "tied": True},
    "dense": {"moe": False, "fused": True},
    "dense, tied head": {"moe": False, "fused": True, "tied": True},
}


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory):
    """A store made from a random checkpoint, and transformers with that store's weights."""
    case = dict(CASES[request.param])
    fused = case.pop("fused")
    root = tmp_path_factory.mktemp("oracle")
    model = oracle.random_model(**case)
    path = mlx_ttd.convert(oracle.save(model, root / "hf", fused), root / "model.ttd")
    with mlx_ttd.load(path, "400MB", slots=6 if case["moe"] else 0) as llm:
        yield llm, oracle.with_weights(model, oracle.store_weights(llm.store))


def step_by_step(llm, tokens):
    cache = llm.model.make_cache()
    return np.stack([np.array(llm.model(mx.array([[t]]), cache=cache))[0, 0] for t in tokens])


def assert_close(found, wanted):
    first, second = np.sort(wanted, axis=-1)[:, -1], np.sort(wanted, axis=-1)[:, -2]
    assert (first - second).min() > 1e-6, "transformers itself has a tie here: choose other tokens"
    error = np.abs(found - wanted)
    assert error.max() < 1e-3
    assert np.sqrt(np.square(error).mean()) < 3e-5
    assert (found.argmax(-1) == wanted.argmax(-1)).all()


@pytest.mark.parametrize("length", [1, 2, 31, 33, 64, 300])
def test_logits_equal_transformers(pair, length):
    llm, model = pair
    tokens = np.random.default_rng(length + 1000).integers(0, llm.store.spec.vocab, length).tolist()
    wanted = oracle.oracle_logits(model, tokens)
    assert_close(np.array(llm.model(mx.array([tokens])))[0], wanted)
    assert_close(step_by_step(llm, tokens), wanted)


def test_prefill_then_steps_equal_transformers(pair):
    llm, model = pair
    tokens = np.random.default_rng(9).integers(0, llm.store.spec.vocab, 280).tolist()
    cache = llm.model.make_cache()
    first = np.array(llm.model(mx.array([tokens[:270]]), cache=cache))[0]
    rest = [np.array(llm.model(mx.array([[t]]), cache=cache))[0, 0] for t in tokens[270:]]
    assert_close(np.concatenate([first, np.stack(rest)]), oracle.oracle_logits(model, tokens))
