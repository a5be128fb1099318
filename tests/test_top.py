"""The greatest logits: every implementation makes the same choice."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_ttd import kernels
from mlx_ttd.kernels.native import extension

needs_native = pytest.mark.skipif(
    extension() is None or mx.default_device().type != mx.DeviceType.cpu, reason="needs the native part and a CPU"
)
SPECIAL = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, 1e-42, -1e-42]


def expected(values: np.ndarray, count: int) -> list[int]:
    return np.lexsort((np.arange(len(values)), -(values + 0.0)))[:count].tolist()


@settings(max_examples=60)
@given(
    st.sampled_from([1, 2, 63, 64, 65, 8191, 8193, 30_000]),
    st.sampled_from([1, 2, 20, 700, 1024, 2000]),
    st.sampled_from(["apart", "alike", "special", "rising", "falling"]),
    st.integers(0, 2**32),
)
def test_every_implementation_takes_the_greatest_and_of_equals_the_lowest(size, count, kind, seed):
    rng, count = np.random.default_rng(seed), min(size, count)
    values = {
        "apart": lambda: rng.standard_normal(size),
        "alike": lambda: rng.integers(0, 3, size),
        "special": lambda: rng.choice(SPECIAL, size),
        "rising": lambda: np.arange(size) // 3,
        "falling": lambda: -np.arange(size) // 3,
    }[kind]()
    logits = mx.array(values.astype(np.float32))
    wanted = expected(np.array(logits), count)
    assert kernels.top(logits, count).tolist() == wanted
    with kernels.forced("reference"):
        assert kernels.top(logits, count).tolist() == wanted


@needs_native
def test_thread_counts_and_instruction_sets_change_no_choice():
    native = extension()
    threads, isa = native.threads(), native.isa()
    logits = mx.array(np.random.default_rng(0).integers(0, 5000, 50_000).astype(np.float32))
    found = set()
    try:
        for count in (1, 3):
            native.set_threads(count)
            for name in native.isas():
                native.set_isa(name)
                found.add(tuple(native.top(logits, 40).tolist()))
    finally:
        native.set_threads(threads)
        native.set_isa(isa)
    assert found == {tuple(expected(np.array(logits), 40))}


@needs_native
def test_impossible_counts_and_shapes_are_refused():
    native = extension()
    for logits, count in ((mx.zeros(4), 0), (mx.zeros(4), 5), (mx.zeros((2, 2)), 1), (mx.zeros(4, mx.bfloat16), 1)):
        with pytest.raises(ValueError, match="must be"):
            native.top(logits, count)
