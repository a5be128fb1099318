"""Stores of real shapes with random weights: sound, repeatable, resumable, and sane to run."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import mlx_ttd
from benchmarks import block, gpu_model, synthetic_store
from benchmarks.llama_cpp_peer import entries
from benchmarks.synthetic_store import read_shape, write_store
from mlx_ttd.errors import ConversionError
from mlx_ttd.spec import model_spec

SMALL = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
}


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = read_shape("qwen3.6-35b-a3b")
    config["text_config"] |= SMALL
    path = tmp_path_factory.mktemp("shape") / "config.json"
    path.write_text(json.dumps(config))
    return path


def digest(store: Path) -> str:
    return str(mlx_ttd.info(store)["digest"])


def test_a_synthetic_store_verifies_and_depends_on_its_seed_alone(shape: Path, tmp_path: Path) -> None:
    first = write_store(shape, tmp_path / "a", layers=4)
    mlx_ttd.verify(first)
    assert digest(first) == digest(write_store(shape, tmp_path / "b", layers=4))
    assert digest(first) != digest(write_store(shape, tmp_path / "c", layers=4, seed=1))


def test_every_record_differs(shape: Path, tmp_path: Path) -> None:
    manifest = json.loads((write_store(shape, tmp_path / "a", layers=2) / "manifest.json").read_text())
    records = [r for entry in manifest["files"].values() for r in entry.get("records", [])]
    assert len(set(records)) == len(records) == 64


def test_an_interrupted_write_resumes_to_the_same_bytes(
    shape: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = write_store(shape, tmp_path / "whole", layers=4)
    write = synthetic_store.write_file
    written: list[str] = []

    def dies_at_the_fourth(draws: synthetic_store.Draws, file: synthetic_store.PlannedFile):
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(file.header.path.name)
        return write(draws, file)

    monkeypatch.setattr(synthetic_store, "write_file", dies_at_the_fourth)
    with pytest.raises(KeyboardInterrupt):
        write_store(shape, tmp_path / "cut", layers=4)
    monkeypatch.undo()
    assert digest(write_store(shape, tmp_path / "cut", layers=4)) == digest(whole)


def test_too_little_disk_is_told_before_anything_is_written(
    shape: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synthetic_store.shutil, "disk_usage", lambda where: type("Usage", (), {"free": 10**9}))
    with pytest.raises(ConversionError, match="GB free"):
        write_store(shape, tmp_path / "a")
    assert not list(tmp_path.rglob("*.safetensors"))


def test_hidden_states_neither_explode_nor_vanish_over_40_layers(shape: Path, tmp_path: Path) -> None:
    store = write_store(shape, tmp_path / "deep")
    with mlx_ttd.load(store, memory="200MB", context=64) as llm:
        state = llm.model.make_cache()
        x = llm.model.embed(np.arange(32))
        out = llm.model.hidden_states(x, state, "prefill")
        before, after = (mx.sqrt(mx.mean(h.astype(mx.float32) ** 2)).item() for h in (x, out))
        assert 0.5 * before < after < 4 * before
        assert 0.1 < mx.std(llm.model.logits(out[-1:], "decode")).item() < 3


def test_skew_makes_tokens_share_experts(shape: Path, tmp_path: Path) -> None:
    def hit_rate(skew: float) -> float:
        store = write_store(shape, tmp_path / str(skew), layers=4, skew=skew)
        with mlx_ttd.load(store, memory="200MB", context=64, slots=6, policy="lru") as llm:
            llm.generate(list(range(8)), max_tokens=40, temperature=1.0, seed=1, ignore_eos=True)
            rate = llm.stats().hit_rate
            assert rate is not None
            return rate

    assert hit_rate(6.0) > 1.3 * hit_rate(0.0)


def test_the_peer_has_as_many_weights_as_the_store(shape: Path) -> None:
    spec = model_spec(read_shape(shape))
    theirs = sum(int(np.prod(size)) for _, size, _ in entries(spec))
    ours = sum(int(np.prod(t.shape)) for t in synthetic_store.trunk_tensors(spec))
    assert theirs == ours


def test_a_block_states_machine_options_and_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = block.Block("name", {"threads": 2}, tmp_path)
    found.results["name.ratio"] = 1.5
    found.note("cache", "cold")
    found.finish(tmp_path / "out.json")
    text = capsys.readouterr().out
    assert all(part in text for part in ("machine:", "before:", "after:", '{"threads": 2}', "cold", "1.5000"))
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["results"] == {"name.ratio": 1.5}
    assert written["machine"]["mlx"]


def test_the_model_of_the_gpu_benchmark_runs(shape: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_model, "STEPS", 3)
    model = gpu_model.our_model(model_spec(read_shape(str(shape), 4)))
    found = gpu_model.our_round(model, np.arange(9))
    assert len(found.tokens) == len(found.steps) == 3
