"""Logits against transformers in fp32, from stores whose weights transformers gets dequantised."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the oracle extra")
pytest.importorskip("transformers", reason="needs the oracle extra")

import checkpoints
import oracle
from test_importers import ALL, ROUTER, mlx_checkpoint

import mlx_ttd
from mlx_ttd.spec import model_spec

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
    with mlx_ttd.load(path, "400MB", slots=6 if case["moe"] else 0, kv_bits=32) as llm:
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


def fp8(path):
    spec = model_spec(checkpoints.FP8)
    tensors = checkpoints.fp8_tensors(checkpoints.hf_tensors(spec, checkpoints.values(spec)), "BF16")
    return checkpoints.write(path, checkpoints.FP8, tensors.encoded)


def qwen3_next(path):
    spec = model_spec(checkpoints.NEXT)
    return checkpoints.write(path, checkpoints.NEXT, checkpoints.next_tensors(spec, checkpoints.values(spec)))


def mlx(path, **quantisation):
    overrides = {f"layers.{i}.mlp.{gate}": ROUTER for i in range(4) for gate in ("gate", "shared_expert_gate")}
    return mlx_checkpoint(path, checkpoints.MOE, {**ALL, **quantisation}, overrides)


LAYOUTS = {
    "published": lambda path: checkpoints.tiny(path, checkpoints.MOE),
    "mlx int4": mlx,
    "mlx int4 group 32": lambda path: mlx(path, group_size=32),
    "mlx 8 bits": lambda path: mlx(path, bits=8),
    "mlx mxfp4": lambda path: mlx(path, group_size=32, mode="mxfp4"),
    "block fp8": fp8,
    "qwen3_next": qwen3_next,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_logits_of_its_weights(layout, tmp_path):
    path = mlx_ttd.convert(LAYOUTS[layout](tmp_path / "checkpoint"), tmp_path / "store.ttd")
    with mlx_ttd.load(path, "400MB", slots=4, kv_bits=32) as llm:
        tokens = np.random.default_rng(5).integers(0, llm.store.spec.vocab, 70).tolist()
        wanted = oracle.oracle_logits(oracle.model_of(llm.store), tokens)
        assert_close(np.array(llm.model(mx.array([tokens])))[0], wanted)
        assert_close(step_by_step(llm, tokens), wanted)
