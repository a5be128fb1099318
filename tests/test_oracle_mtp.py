"""Logits of the imported multi-token-prediction layer against transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the oracle extra")
pytest.importorskip("transformers", reason="needs the oracle extra")

import oracle
import torch
import transformers
from checkpoints import DENSE, MOE, TEXT, tiny

import mlx_ttd
from mlx_ttd.layers import ResidentWeights
from mlx_ttd.models import MTPLayer
from mlx_ttd.observe import Counters
from mlx_ttd.store import Store, open_store
from mlx_ttd.streaming import ExpertProvider, Ledger, ReadPool

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

TOKENS = np.random.default_rng(8).integers(0, TEXT["vocab_size"], 41).tolist()
OWN = {"fc": "eh_proj", "norm_embedding": "enorm", "norm_hidden": "hnorm", "norm": "post_norm"}


def oracle_models(store: Store, config: dict[str, Any]) -> tuple[Any, Any]:
    """transformers' trunk and its MTP model with the weights of the store."""
    family = "Qwen3_5Moe" if store.spec.is_moe else "Qwen3_5"
    fields = {k: v for k, v in config["text_config"].items() if k != "model_type"}
    config = getattr(transformers, f"{family}TextConfig")(**fields)
    config.num_mtp_layers, config.mtp_layer_types = 1, ["full_attention"]
    trunk = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    oracle.with_weights(trunk, oracle.store_weights(store))
    mtp = transformers.modeling_layers.MtpModel(trunk, 1).float().eval()
    found = {
        f"layers.0.{theirs}.weight": oracle._dense(store.mtp, name, store.mtp.resident) for name, theirs in OWN.items()
    }
    for role, name in oracle.NAMES.items():
        if f"layers.0.{role}" in store.mtp.resident:
            found[f"layers.0.mtp_block.{name}"] = oracle._dense(store.mtp, f"layers.0.{role}", store.mtp.resident)
    if store.spec.is_moe:
        gate_up, down = oracle._experts(store.mtp, 0)
        found |= {
            "layers.0.mtp_block.mlp.experts.gate_up_proj": gate_up,
            "layers.0.mtp_block.mlp.experts.down_proj": down,
        }
    missing, extra = mtp.load_state_dict({k: torch.from_numpy(v.copy()) for k, v in found.items()}, strict=False)
    assert not extra
    assert {name.split(".")[0] for name in missing} <= {"embed_tokens", "shared_head"}
    return trunk, mtp


@pytest.mark.parametrize("config", [MOE, DENSE], ids=["moe", "dense"])
def test_mtp_logits_equal_transformers(tmp_path: Path, config: dict[str, Any]) -> None:
    path = mlx_ttd.convert(tiny(tmp_path / "src", config, mtp=True, dtype="F32"), tmp_path / "dst")
    store = open_store(path)
    trunk, mtp = oracle_models(store, config)
    ids = torch.tensor([TOKENS])
    with torch.no_grad():
        hidden = trunk.model(ids[:, :-1]).last_hidden_state
        positions = torch.arange(1, len(TOKENS))[None]
        rows = mtp.forward_layer(0, hidden, positions, None, input_ids=ids[:, 1:])
        wanted = mtp._project_to_logits(rows)[0].numpy()
    with mlx_ttd.load(path, "400MB", kv_bits=32) as llm:
        provider = None
        if store.spec.is_moe:
            counters = Counters()
            provider = ExpertProvider(store.mtp, 8, Ledger(10**8), counters, ReadPool(1, 1, counters))
        layer = MTPLayer(store.mtp.spec, ResidentWeights(store.mtp), provider, llm.model)
        tokens = np.array(TOKENS)
        rows = llm.model.hidden_states(llm.model.embed(tokens[:-1]), llm.model.make_cache(), "prefill")
        found = np.array(layer(rows, mx.array(tokens[1:]), layer.make_cache(), "prefill"))
    assert np.abs(found - wanted).max() < 1e-5 * np.abs(wanted).max()
