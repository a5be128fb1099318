"""A tied flag beside a head in the files: a copy is dropped, any other is the model's; an untied model has one."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import DENSE, DENSE_TEXT, TIED, Tensors, hf_tensors, mlx_tensors, values, write
from test_convert import bits

import mlx_ttd
from mlx_ttd.errors import CheckpointError, StoreError
from mlx_ttd.spec import model_spec
from mlx_ttd.store import convert, info, open_store, planned_store, read_tensor, verify
from mlx_ttd.store import own_head as module

SPEC = model_spec(DENSE)
EMBEDDING = "model.language_model.embed_tokens.weight"


def with_head(last: int) -> Tensors:
    """A checkpoint whose head is the embedding but for its last number, greater by `last` steps."""
    tensors = hf_tensors(SPEC, values(SPEC))
    dtype, array = tensors[EMBEDDING]
    head = array.copy()
    head[-1, -1] += last
    return tensors | {"lm_head.weight": (dtype, head)}


@pytest.mark.parametrize("range_bytes", [16 << 20, 1000])
def test_a_head_of_other_bytes_is_the_models_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, range_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RANGE_BYTES", range_bytes)
    monkeypatch.setattr(module, "LOOK_BYTES", 16)
    tensors = with_head(1)
    with caplog.at_level(logging.WARNING):
        store = open_store(convert(write(tmp_path / "src", TIED, tensors), tmp_path / "dst"))
    assert "ties the head to the embedding, and lm_head.weight holds other numbers" in caplog.text
    assert (store.spec.tied, store.manifest.tied, info(store.path)["tied_head"]) == (False, False, False)
    np.testing.assert_array_equal(bits(read_tensor(store.resident["head"])), tensors["lm_head.weight"][1])
    assert verify(store.path)
    untied = convert(write(tmp_path / "untied", DENSE, tensors), tmp_path / "untied.ttd")
    logits = []
    for path in (store.path, untied):
        with mlx_ttd.load(path, "300MB") as llm:
            logits.append(np.array(llm.model(mx.array([[1, 2, 3]])).astype(mx.float32)))
    np.testing.assert_array_equal(*logits)


def test_a_copy_of_the_embedding_is_no_head(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(convert(write(tmp_path / "src", TIED, with_head(0)), tmp_path / "dst"))
    assert (store.spec.tied, "head" in store.resident, "tied" in (store.path / "manifest.json").read_text()) == (
        True,
        False,
        False,
    )
    assert not caplog.records


@pytest.mark.parametrize("same", [True, False])
def test_packed_heads(tmp_path: Path, same: bool) -> None:
    weights = values(SPEC)
    if same:
        weights["head"] = weights["embedding"]
    tensors = mlx_tensors(SPEC, weights, lambda _: (4, 64, "affine"))
    config = TIED | {"quantization": {"group_size": 64, "bits": 4}}
    store = open_store(convert(write(tmp_path / "src", config, tensors), tmp_path / "dst"))
    assert store.spec.tied == same


def test_a_plan_counts_the_head(tmp_path: Path) -> None:
    source = write(tmp_path / "src", TIED, hf_tensors(SPEC, values(SPEC)))
    assert "head" in planned_store(source).resident


def test_an_untied_model_without_a_head_is_refused(tmp_path: Path) -> None:
    tensors = hf_tensors(SPEC, values(SPEC))
    del tensors["lm_head.weight"]
    config = {"model_type": "qwen3_5", "tie_word_embeddings": True, "text_config": DENSE_TEXT}
    with pytest.raises(CheckpointError, match=r"head needs lm_head\.weight, since config\.json does not tie the head"):
        convert(write(tmp_path / "src", config, tensors), tmp_path / "dst")


@pytest.mark.parametrize("value", [True, "no", 0])
def test_a_manifest_says_nothing_else_of_the_tie(tmp_path: Path, value: object) -> None:
    store = convert(write(tmp_path / "src", DENSE, hf_tensors(SPEC, values(SPEC))), tmp_path / "dst")
    path = store / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tied": value}))
    with pytest.raises(StoreError, match="tied is"):
        open_store(store)
