"""The experts on the reference and the native form: any spread of tokens over experts, any split in leases."""

from __future__ import annotations

import dataclasses

import mlx.core as mx
import numpy as np
import pytest
from native_cases import exact_contributions, random_bank

from mlx_ttd import kernels
from mlx_ttd.kernels import native_extension
from mlx_ttd.spec import Quantisation, record_layout

EXPERTS, HIDDEN, INTER, TOP_K = 9, 128, 64, 3
LAYOUT = record_layout(HIDDEN, INTER, Quantisation(4, 64), Quantisation(4, 64))
BACKENDS = ["reference", *(["native"] if native_extension() is not None else [])]


def spread(kind, tokens, rng):
    """Expert ids [tokens, k] ascending."""
    if kind == "all to one set":
        return np.tile(np.array([1, 4, 7], np.int32), (tokens, 1))
    pool = np.delete(np.arange(EXPERTS), 5) if kind == "one expert has none" else np.arange(EXPERTS)
    return np.array([np.sort(rng.choice(pool, TOP_K, replace=False)) for _ in range(tokens)], np.int32)


def close(found, exact):
    return np.abs(np.array(found) - exact).max() < 1e-5 * np.sqrt((exact**2).mean())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [1, 2, 33])
@pytest.mark.parametrize("kind", ["all to one set", "one expert has none", "even"])
def test_every_form_gives_the_float64_sum(backend, tokens, kind):
    rng = np.random.default_rng(tokens)
    bank, rows = random_bank(LAYOUT, EXPERTS, rng), mx.array(spread(kind, tokens, rng))
    x = mx.array(rng.standard_normal((tokens, HIDDEN)).astype(np.float32))
    weights = mx.array(rng.dirichlet(np.ones(TOP_K), tokens).astype(np.float32))
    exact = exact_contributions(x, bank, rows, LAYOUT)
    total = (exact * np.array(weights, np.float64)[..., None]).sum(axis=1)
    with kernels.forced(backend):
        contributions = kernels.expert_contributions(x, bank, rows, LAYOUT)
        fused = kernels.expert_ffn(x, bank, rows, weights, LAYOUT)
        acc = kernels.expert_ffn_accumulate(mx.zeros((tokens, HIDDEN)), x, bank, rows, weights, LAYOUT)
    with kernels.forced("reference"):
        combined = kernels.combine(contributions, weights)
    assert close(contributions, exact)
    assert close(acc, total)
    assert mx.array_equal(fused, combined)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cuts", [(4,), (1, 2, 8), (3, 3, 6)])
def test_leases_in_ascending_order_add_up_to_one(backend, cuts):
    rng = np.random.default_rng(1)
    bank, rows = random_bank(LAYOUT, EXPERTS, rng), mx.array(spread("even", 40, rng))
    x = mx.array(rng.standard_normal((40, HIDDEN)).astype(np.float32))
    weights = mx.array(rng.dirichlet(np.ones(TOP_K), 40).astype(np.float32))
    with kernels.forced(backend):
        whole = kernels.expert_ffn_accumulate(mx.zeros((40, HIDDEN)), x, bank, rows, weights, LAYOUT)
        acc = mx.zeros((40, HIDDEN))
        for first, last in zip((0, *cuts), (*cuts, EXPERTS), strict=True):
            held = (mx.arange(EXPERTS) >= first) & (mx.arange(EXPERTS) < last)
            lease = dataclasses.replace(bank, slot_of=mx.where(held, bank.slot_of, -1))
            acc = kernels.expert_ffn_accumulate(acc, x, lease, rows, weights, LAYOUT)
    assert mx.array_equal(acc, whole)
