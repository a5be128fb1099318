"""The same tokens and the same logits, bit for bit, whatever the memory, the reads, the chunks and the policy."""

from __future__ import annotations

import functools
import itertools
import json
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlx_ttd
from mlx_ttd import kernels
from mlx_ttd.generation import array_digest
from mlx_ttd.kernels.native import extension
from mlx_ttd.layers import StreamedExperts
from mlx_ttd.streaming import policy_names

MEMORY = "400MB"
PROMPT = np.random.default_rng(0).integers(0, 2000, 700).tolist()
RESIDENT = {"slots": 24}


class Always:
    """A trial of guessing that has begun and does not end."""

    def due(self, layer):
        return True


@functools.cache
def digests(**options):
    """(tokens, logits of every step) of a prompt of 700 tokens and 12 more."""
    with mlx_ttd.load("demo", MEMORY, **options) as llm:
        guessing = llm.provider.next_layer is not None
        if guessing:
            llm.provider.next_layer.trial = Always()
        found = run(llm)
        prefetched = llm.stats().counters.prefetched
        # With a slot for each expert there may be one left to guess at, or none.
        assert prefetched == 0 if not guessing else prefetched > 0 or llm.provider.slots == 24
        return found


def run(llm):
    logits = []

    def note(tokens, row):
        logits.append(np.array(row))
        return row

    response = llm.generate(PROMPT, max_tokens=12, processors=[note], ignore_eos=True)
    return response.digest, array_digest(np.stack(logits))


@pytest.mark.parametrize(
    ("slots", "policy"), [*itertools.product((4, 6), sorted(policy_names())), (12, "lfu"), (23, "lru")]
)
def test_budget_and_policy_change_no_bit(slots, policy):
    assert digests(slots=slots, policy=policy) == digests(**RESIDENT)


@pytest.mark.parametrize(("depth", "parts"), [(1, 1), (16, 1), (4, 2)])
def test_read_concurrency_changes_no_bit(depth, parts):
    assert digests(slots=5, depth=depth, parts=parts) == digests(**RESIDENT)


def test_direct_reads_change_no_bit():
    assert digests(slots=5, read_mode="direct") == digests(**RESIDENT)


@pytest.mark.parametrize("verify", ["off", "always"])
def test_verification_changes_no_bit(verify):
    assert digests(slots=5, verify=verify) == digests(**RESIDENT)


@pytest.mark.parametrize(("slots", "policy"), [*itertools.product((4, 7, 16), sorted(policy_names()))])
def test_prefetch_changes_no_bit(slots, policy):
    assert digests(slots=slots, policy=policy, prefetch="next-layer") == digests(**RESIDENT)


@pytest.mark.parametrize("blocks", [1, 2, 5])
@pytest.mark.parametrize("slots", [4, 24])
def test_chunk_width_changes_no_bit(blocks, slots):
    assert digests(slots=slots, prefill_chunk=blocks * kernels.BLOCK) == digests(**RESIDENT)


@settings(max_examples=12, deadline=None)
@given(
    slots=st.integers(4, 24),
    policy=st.sampled_from(sorted(policy_names())),
    depth=st.integers(1, 16),
    parts=st.integers(1, 4),
    read_mode=st.sampled_from(["cached", "direct"]),
    verify=st.sampled_from(["off", "first-read", "always"]),
    prefetch=st.sampled_from(["off", "next-layer"]),
    prefill_chunk=st.integers(1, 4).map(lambda blocks: blocks * kernels.BLOCK),
)
def test_no_combination_of_options_changes_a_bit(**options):
    assert digests(**options) == digests(**RESIDENT)


def test_the_least_budget_changes_no_bit():
    least = mlx_ttd.info("demo")["least_bytes"]
    with mlx_ttd.load("demo", least) as llm:
        assert llm.division.slots < llm.store.spec.experts
        assert run(llm) == digests(**RESIDENT)


def test_a_new_process_changes_no_bit():
    code = (
        "import sys, json; sys.path.insert(0, sys.argv[1]);"
        "import test_determinism as t; print(json.dumps(t.digests(slots=7)))"
    )
    folder = str(__file__).rsplit("/", 1)[0]
    output = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True).stdout
    assert tuple(json.loads(output)) == digests(**RESIDENT)


@pytest.fixture
def native():
    """The native part, its number of threads put back afterwards."""
    part = extension()
    if part is None:
        pytest.skip("not run: the native part is not built")
    before = part.threads()
    yield part
    part.set_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_threads_change_no_bit(threads, native):
    wanted = digests(**RESIDENT)
    native.set_threads(threads)
    with mlx_ttd.load("demo", MEMORY, slots=5, depth=threads) as llm:
        assert run(llm) == wanted


@pytest.mark.parametrize("backend", ["reference", "native"])
def test_each_backend_is_deterministic(backend):
    if backend == "native" and extension() is None:
        pytest.skip("not run: the native part is not built")
    with mlx_ttd.load("demo", MEMORY, backend="auto" if backend == "native" else backend, slots=24) as llm:
        wanted = run(llm)
    with mlx_ttd.load(
        "demo", MEMORY, backend="auto" if backend == "native" else backend, slots=4, prefill_chunk=256
    ) as llm:
        assert run(llm) == wanted


def bf16_router(monkeypatch):
    route = kernels.route

    def rounded(x, y, norm, eps, *rest):
        routed = route(x, y, norm, eps, *rest)
        ids, weights = kernels.router(routed.normed.astype(mx.bfloat16).astype(x.dtype), *rest)
        return routed._replace(ids=ids, weights=weights)

    monkeypatch.setattr(kernels, "route", rounded)


def sum_in_two_halves(monkeypatch):
    def combine(self, x, ids, weights, mode, meanwhile=()):
        lease_parts = []
        for lease in self.provider.waves(self.layer, np.array(ids)):
            part = kernels.expert_contributions(x, lease, ids, self.layout)
            lease_parts.append(mx.where((lease.slot_of[ids] >= 0)[..., None], part, 0))
            lease.release()
        total = sum(lease_parts)
        half = ids.shape[1] // 2
        return kernels.combine(total[:, :half], weights[:, :half]) + kernels.combine(total[:, half:], weights[:, half:])

    monkeypatch.setattr(StreamedExperts, "__call__", combine)


def sum_in_descending_order(monkeypatch):
    combine = kernels.combine

    def call(self, x, ids, weights, mode, meanwhile=()):
        total = mx.zeros((*ids.shape, x.shape[1]))
        for lease in self.provider.waves(self.layer, np.array(ids)):
            part = kernels.expert_contributions(x, lease, ids, self.layout)
            total = mx.where((lease.slot_of[ids] >= 0)[..., None], part, total)
            lease.release()
        return combine(total[:, ::-1], weights[:, ::-1])

    monkeypatch.setattr(StreamedExperts, "__call__", call)


@pytest.mark.parametrize("fault", [bf16_router, sum_in_two_halves, sum_in_descending_order])
def test_a_planted_fault_is_seen(fault, monkeypatch):
    wanted = digests(**RESIDENT)
    fault(monkeypatch)
    with mlx_ttd.load("demo", MEMORY, **RESIDENT) as llm:
        assert run(llm)[1] != wanted[1]
