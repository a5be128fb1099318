"""A delta-net and a full-attention layer of the 35B shapes: the same bits for every budget, read, chunk and thread."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from test_determinism import bf16_router, sum_in_descending_order, sum_in_two_halves

import mlx_ttd
from benchmarks.synthetic_store import read_shape, write_store
from mlx_ttd.generation import array_digest
from mlx_ttd.kernels.native import extension

MEMORY, TOP_K = "5GB", 8
PROMPT = np.random.default_rng(0).integers(0, 248_320, 300).tolist()
ARMS = [
    {"slots": TOP_K},
    {"slots": 64, "policy": "lru"},
    {"slots": 200, "policy": "fifo", "depth": 1},
    {"slots": 40, "depth": 16, "parts": 4},
    {"slots": 40, "read_mode": "direct"},
    {"slots": 40, "policy": "lfu", "prefetch": "next-layer"},
    {"slots": 100, "prefill_chunk": 256, "verify": "off"},
    {"slots": 256, "prefill_chunk": 512, "verify": "always"},
    {"slots": 32, "threads": 1},
    {"slots": 32, "threads": 3},
]


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("full size")
    config = read_shape("qwen3.6-35b-a3b")
    config["text_config"] |= {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    (folder / "config.json").write_text(json.dumps(config))
    return write_store(folder / "config.json", folder / "store", head_bits=4, embed_bits=4)


def digests(store: Path, threads: int | None = None, **options) -> tuple[str, str, str]:
    """(tokens, hidden states of every token, logits of every step) of a prompt of 300 tokens and 4 more."""
    hidden, logits = [], []

    def note(tokens, row):
        logits.append(np.array(row))
        return row

    part = extension()
    before = part.threads() if part else 0
    if part and threads:
        part.set_threads(threads)
    try:
        with mlx_ttd.load(store, MEMORY, context=512, **options) as llm:
            model = llm._core.model
            states = model.hidden_states

            def noted(*arguments):
                rows = states(*arguments)
                # Here, in the thread that can.
                hidden.append(np.array(rows.astype(mx.float32)))
                return rows

            model.hidden_states = noted
            response = llm.generate(PROMPT, max_tokens=4, processors=[note], ignore_eos=True)
            assert llm.stats().counters.misses > 0
    finally:
        if part and threads:
            part.set_threads(before)
    rows = np.concatenate(hidden)
    assert len(rows) == len(PROMPT) + 3
    return response.digest, array_digest(rows), array_digest(np.stack(logits))


@pytest.fixture(scope="module")
def wanted(store) -> tuple[str, str, str]:
    return digests(store, slots=256)


@pytest.mark.slow
@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_no_setting_changes_a_bit(arm, store, wanted):
    if "threads" in arm and extension() is None:
        pytest.skip("not run: the native part is not built")
    assert digests(store, **arm) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("fault", [bf16_router, sum_in_two_halves, sum_in_descending_order])
def test_a_planted_fault_is_seen(fault, store, wanted, monkeypatch):
    fault(monkeypatch)
    assert digests(store, slots=40)[1] != wanted[1]
