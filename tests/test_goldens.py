"""Logits against those that transformers gave in fp32 (goldens.py), prefilled and step by step, with f32 keys."""

from __future__ import annotations

import goldens
import mlx.core as mx
import numpy as np
import pytest

import mlx_ttd

MEMORY = "300MB"


def both_ways(llm, tokens):
    prefilled = np.array(llm.model(mx.array([tokens])))[0]
    cache = llm.model.make_cache()
    steps = np.stack([np.array(llm.model(mx.array([[t]]), cache=cache))[0, 0] for t in tokens])
    return prefilled, steps


@pytest.mark.parametrize("name", goldens.TINY)
def test_tiny_random_models(name, tmp_path):
    wanted = np.load(goldens.FOLDER / f"{name}.npz")["logits"]
    with mlx_ttd.load(goldens.tiny_store(name, tmp_path).path, MEMORY, kv_bits=32) as llm:
        for found in both_ways(llm, goldens.tiny_tokens(llm.store)):
            error = found - wanted
            assert np.abs(error).max() < 1e-3
            assert np.sqrt(np.square(error).mean()) < 3e-5
            assert (found.argmax(-1) == wanted.argmax(-1)).all()


def test_the_demo_model():
    golden = np.load(goldens.FOLDER / "demo.npz")
    with mlx_ttd.load("demo", MEMORY, slots=8, kv_bits=32) as llm:
        assert str(golden["digest"]) == llm.store.digest, (
            "the demo store changed: run tests/goldens.py with transformers"
        )
        tokens = goldens.demo_tokens(llm.store)
        for found in both_ways(llm, tokens):
            np.testing.assert_allclose(found[-goldens.KEPT :], golden["logits"], rtol=0, atol=2e-4)
        response = llm.generate(tokens, max_tokens=goldens.GREEDY, ignore_eos=True)
        assert list(response.tokens) == golden["greedy"].tolist()
