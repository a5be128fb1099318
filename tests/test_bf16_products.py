"""Prefill's products in bf16: their error bound, bits that nothing but the row decides, and the option."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from native_cases import as_float64, exact_contributions, random_bank, random_choices, random_weight

import mlx_ttd
from mlx_ttd import kernels
from mlx_ttd.errors import KernelError, StateError
from mlx_ttd.kernels.native import extension
from mlx_ttd.spec import Quantisation, record_layout

native = extension()
needs_tiles = pytest.mark.skipif(
    mx.default_device().type != mx.DeviceType.cpu or not kernels.has_bf16_products(), reason="needs AMX-BF16"
)


def random_rows(rng: np.random.Generator, *shape: int) -> mx.array:
    return mx.array(rng.standard_normal(shape).astype(np.float32))


def rounded(x: mx.array, w: kernels.Weight) -> mx.array:
    with kernels.bf16_products(True):
        return kernels.linear(x, w, "prefill")


@needs_tiles
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("rows", [1, 33, 70])
@pytest.mark.parametrize("tokens", [1, 16, 37, 100])
def test_products_are_within_their_bound(group, rows, tokens):
    rng, cols = np.random.default_rng(tokens), 256
    w, exact = random_weight(rows, cols, "int4", rng, group)
    x = random_rows(rng, tokens, cols)
    found = np.float64(np.array(rounded(x, w)))
    error = np.abs(found - as_float64(x) @ exact.T)
    assert (error <= (2**-7 + 2**-16 + cols * 2**-24) * (np.abs(as_float64(x)) @ np.abs(exact).T)).all()
    assert error.max() > 0
    assert not mx.array_equal(rounded(x, w), kernels.linear(x, w, "prefill"))


@needs_tiles
def test_a_row_depends_on_nothing_but_itself_and_no_thread_count():
    rng = np.random.default_rng(0)
    w, _ = random_weight(70, 256, "int4", rng)
    x = random_rows(rng, 100, 256)
    whole, threads = rounded(x, w), native.threads()
    try:
        for count in (1, 3):
            native.set_threads(count)
            parts = [rounded(x[first:last], w) for first, last in ((0, 1), (1, 18), (18, 100))]
            assert mx.array_equal(mx.concatenate(parts), whole)
    finally:
        native.set_threads(threads)


@needs_tiles
def test_decoding_and_other_weights_stay_exact():
    rng = np.random.default_rng(0)
    x = random_rows(rng, 5, 256)
    for form, mode in (("int4", "decode"), ("int4", "verify"), ("int8", "prefill"), ("bfloat16", "prefill")):
        w, _ = random_weight(40, 256, form, rng)
        exact = kernels.linear(x, w, mode)
        with kernels.bf16_products(True):
            assert mx.array_equal(kernels.linear(x, w, mode), exact)


@needs_tiles
def test_a_block_within_a_block_gives_back_what_held_before():
    rng = np.random.default_rng(0)
    w, _ = random_weight(40, 256, "int4", rng)
    x = random_rows(rng, 5, 256)
    exact, coarse = kernels.linear(x, w, "prefill"), rounded(x, w)
    assert not mx.array_equal(coarse, exact)
    for outer, around in ((True, coarse), (False, exact)):
        with kernels.bf16_products(outer):
            for inner, within in ((True, coarse), (False, exact)):
                with kernels.bf16_products(inner):
                    assert mx.array_equal(kernels.linear(x, w, "prefill"), within)
                assert mx.array_equal(kernels.linear(x, w, "prefill"), around)
    assert mx.array_equal(kernels.linear(x, w, "prefill"), exact)


def test_blocks_nest_where_the_native_part_only_records_them(monkeypatch):
    asked = []
    fake = SimpleNamespace(set_bf16_products=asked.append)
    monkeypatch.setattr(sys.modules["mlx_ttd.kernels.bf16_products"], "extension", lambda: fake)
    with kernels.bf16_products(True):
        with kernels.bf16_products(True), pytest.raises(KeyError), kernels.bf16_products(False):
            raise KeyError
        assert asked == [True, False, True]
    assert asked == [True, False, True, False]


@needs_tiles
@pytest.mark.parametrize("tokens", [3, 40, 150])
def test_experts_in_bf16(tokens):
    rng = np.random.default_rng(tokens)
    layout = record_layout(128, 64, Quantisation(4, 64), Quantisation(4, 64))
    bank, x = random_bank(layout, 6, rng), random_rows(rng, tokens, 128)
    rows, weights = random_choices(tokens, 2, 6, rng), mx.full((tokens, 2), 0.5)
    lease = SimpleNamespace(records=bank.records, slot_of=bank.slot_of, outputs=[])
    exact = exact_contributions(x, bank, rows, layout).sum(axis=1) * 0.5

    def run(first: int, last: int) -> mx.array:
        part = x[first:last]
        with kernels.bf16_products(True):
            return kernels.expert_ffn_accumulate(
                mx.zeros_like(part), part, lease, rows[first:last], weights[first:last], layout
            )

    found = run(0, tokens)
    assert 1e-5 < np.abs(np.array(found) - exact).max() / np.abs(exact).max() < 0.02
    assert mx.array_equal(mx.concatenate([run(0, 1), run(1, tokens)]), found)


@needs_tiles
def test_a_model_with_them_gives_the_same_bits_for_every_chunk():
    found = set()
    for chunk in (256, 1024):
        with mlx_ttd.load("demo", "150MB", matmul="bf16", prefill_chunk=chunk) as llm:
            response = llm.generate("And it came to pass in those days, that " * 40, max_tokens=8)
            found.add((response.digest, response.logits_digest))
    with mlx_ttd.load("demo", "150MB") as llm:
        exact = llm.generate("And it came to pass in those days, that " * 40, max_tokens=8)
    assert len(found) == 1
    assert exact.logits_digest not in found.pop()


@needs_tiles
def test_a_state_made_with_them_is_told_from_an_exact_one(tmp_path):
    path = tmp_path / "state.safetensors"
    with mlx_ttd.load("demo", "150MB", matmul="bf16") as llm:
        llm.generate("And it came to pass", max_tokens=2)
        llm.save_state(path)
    with mlx_ttd.load("demo", "150MB") as exact, pytest.raises(StateError, match="matmul"):
        exact.restore_state(path)


def test_where_they_cannot_be_had_loading_says_so(monkeypatch):
    monkeypatch.setattr(kernels, "has_bf16_products", lambda: False)
    with pytest.raises(KernelError, match="matmul='bf16' cannot be had"):
        mlx_ttd.load("demo", "150MB", matmul="bf16")
