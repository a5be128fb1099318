"""One layer of the real 35B shapes: the same tokens and logits for every slot count, policy, depth, chunk, thread."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import mlx_ttd
from mlx_ttd import kernels
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
    {"slots": 100, "prefill_chunk": 256, "verify": "off"},
    {"slots": 256, "prefill_chunk": 512, "verify": "always"},
    {"slots": 32, "threads": 1},
    {"slots": 32, "threads": 3},
]


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("full size") / "store"
    command = [sys.executable, "-m", "benchmarks.synthetic_store", "qwen3.6-35b-a3b", path, "--layers", "1"]
    subprocess.run([*command, "--head-bits", "4"], cwd=Path(__file__).parents[1], check=True, capture_output=True)
    return path


def digests(store: Path, threads: int | None = None, **options) -> tuple[str, str]:
    """(tokens, logits of every step) of a prompt of 300 tokens and 4 more."""
    rows = []

    def note(tokens, row):
        rows.append(np.array(row))
        return row

    part = extension()
    before = part.threads() if part else 0
    if part and threads:
        part.set_threads(threads)
    try:
        with mlx_ttd.load(store, MEMORY, context=512, **options) as llm:
            response = llm.generate(PROMPT, max_tokens=4, processors=[note], ignore_eos=True)
            assert llm.stats().counters.misses > 0
    finally:
        if part and threads:
            part.set_threads(before)
    return response.digest, array_digest(np.stack(rows))


@pytest.fixture(scope="module")
def wanted(store) -> tuple[str, str]:
    return digests(store, slots=256)


@pytest.mark.slow
@pytest.mark.parametrize("arm", ARMS, ids=str)
def test_no_setting_changes_a_bit(arm, store, wanted):
    if "threads" in arm and extension() is None:
        pytest.skip("not run: the native part is not built")
    assert digests(store, **arm) == wanted


@pytest.mark.slow
def test_a_router_in_bf16_is_seen(store, wanted, monkeypatch):
    router = kernels.router
    monkeypatch.setattr(kernels, "router", lambda x, *rest: router(x.astype(mx.bfloat16).astype(x.dtype), *rest))
    assert digests(store, slots=40)[1] != wanted[1]
