"""Native operations that make a whole part of a layer: against the references, and the bits of their parts."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_cases import random_bank, random_choices

from mlx_ttd import kernels
from mlx_ttd.kernels import DeltaMixer, SharedExpert, Weight
from mlx_ttd.kernels.native import extension
from mlx_ttd.kernels.native_gated_delta import MOST_TAPS
from mlx_ttd.spec import Quantisation, record_layout

pytestmark = pytest.mark.skipif(
    extension() is None or mx.default_device().type != mx.DeviceType.cpu, reason="needs the native part and a CPU"
)
DTYPES = st.sampled_from([mx.float32, mx.bfloat16])
SHAPES = [(1, 2, 32, 64), (2, 2, 64, 32), (3, 1, 24, 64)]  # key heads, value heads to each, dk, dv
STEPS = st.sampled_from(["decode", "verify"])


def same(a, b):
    return a.dtype == b.dtype and bool(mx.array_equal(a.view(mx.uint8), b.view(mx.uint8)))


def close(found, wanted):
    wanted = np.array(wanted.astype(mx.float32))
    return np.abs(np.array(found.astype(mx.float32)) - wanted).max() < 1e-5 * max(1.0, np.abs(wanted).max())


def normal(rng, *shape, scale=1.0):
    return mx.array((rng.standard_normal(shape) * scale).astype(np.float32))


def weight(rng, rows, cols, bits=4, group=64):
    dense = normal(rng, rows, cols, scale=cols**-0.5)
    if bits == 16:
        return Weight(dense.astype(mx.bfloat16))
    return Weight(*mx.quantize(dense, group, bits), bits, group, "affine")


def shared(rng, hidden, inter):
    shapes = ((inter, hidden, 4), (inter, hidden, 4), (hidden, inter, 4), (1, hidden, 16))
    return SharedExpert(*(weight(rng, *shape) for shape in shapes))


def mixer(rng, hidden, key_heads, repeats, dim, value_dim, taps=4):
    heads = key_heads * repeats
    channels, values = 2 * key_heads * dim + heads * value_dim, heads * value_dim
    shapes = ((channels, hidden, 4), (values, hidden, 4), (heads, hidden, 16), (heads, hidden, 16), (hidden, values, 4))
    vectors = (
        normal(rng, channels, taps, scale=0.5),
        normal(rng, heads),
        normal(rng, heads),
        1 + normal(rng, value_dim) / 8,
    )
    return DeltaMixer(*(weight(rng, *shape) for shape in shapes), *vectors, key_heads, 1e-6)


@settings(max_examples=20)
@given(st.integers(1, 3), st.sampled_from([1, 5, 100]), DTYPES, st.booleans(), st.integers(0, 2**32))
def test_a_pair_has_the_bits_of_each(groups, tokens, dtype, prefill, seed):
    rng = np.random.default_rng(seed)
    x = normal(rng, tokens, 64 * groups).astype(dtype)
    pair = [weight(rng, rows, 64 * groups, bits) for rows, bits in ((40, 4), (7, 16))]
    mode = "prefill" if prefill else "verify"
    for found, w in zip(kernels.linear_pair(x, *pair, mode), pair, strict=True):
        assert same(found, kernels.linear(x, w, mode))


@settings(max_examples=15)
@given(st.sampled_from([1, 4, 70]), STEPS, st.integers(0, 2**32))
def test_the_shared_expert_against_the_reference(tokens, mode, seed):
    rng = np.random.default_rng(seed)
    w, x = shared(rng, 128, 64), normal(rng, tokens, 128)
    found = kernels.shared_expert(x, w, mode)
    assert same(found[:1], kernels.shared_expert(x[:1], w, mode))
    with kernels.forced("reference"):
        assert close(found, kernels.shared_expert(x, w, mode))


@settings(max_examples=20)
@given(st.integers(1, 9), DTYPES, STEPS, st.integers(0, 2**32))
def test_a_mixture_step_has_the_bits_of_its_parts(tokens, dtype, mode, seed):
    rng = np.random.default_rng(seed)
    q = Quantisation(4, 64, "affine", "bfloat16")
    layout, w = record_layout(128, 64, q, q), shared(rng, 128, 64)
    bank, rows = random_bank(layout, 6, rng), random_choices(tokens, 3, 6, rng)
    weights = mx.array(rng.random((tokens, 3)).astype(np.float32))
    residual, x = (normal(rng, tokens, 128).astype(dtype) for _ in range(2))
    found = kernels.moe(residual, x, bank, rows, weights, layout, w, mode)
    experts = kernels.expert_ffn(x, bank, rows, weights, layout) + kernels.shared_expert(x, w, mode)
    assert same(found, residual + experts.astype(dtype))


@settings(max_examples=20)
@given(
    st.integers(1, 9), st.sampled_from([(1, 2, 32, 64), (2, 2, 64, 32), (3, 1, 24, 64)]), STEPS, st.integers(0, 2**32)
)
def test_a_delta_mixer_has_the_bits_of_its_parts(tokens, shape, mode, seed):
    rng = np.random.default_rng(seed)
    key_heads, repeats, dim, value_dim = shape
    heads, channels = key_heads * repeats, 2 * key_heads * dim + key_heads * repeats * value_dim
    w, x = mixer(rng, 128, *shape), normal(rng, tokens, 128)
    state = normal(rng, 3, channels), normal(rng, heads, value_dim, dim, scale=0.3)
    found = kernels.delta_mixer(x, w, *state, mode)
    qkv, z, a, b = (kernels.linear(x, m, mode) for m in (w.qkv, w.z, w.a, w.b))
    mixed = kernels.gated_delta(qkv, a, b, state[0], w.conv, w.a_log, w.dt_bias, state[1], key_heads, mode)
    gated = kernels.gated_rms_norm(mixed.out, z.reshape(mixed.out.shape), w.norm, w.eps).reshape(z.shape)
    assert same(found.out, kernels.linear(gated, w.out, mode))
    assert same(found.conv_state, mixed.conv_state)
    assert same(found.state, mixed.state)
    with kernels.forced("reference"):
        for part, wanted in zip(found, kernels.delta_mixer(x, w, *state, mode), strict=True):
            assert close(part, wanted)


def test_a_convolution_of_more_taps_than_native_ones_take_is_left_to_the_reference():
    rng = np.random.default_rng(0)
    for taps, kind in ((MOST_TAPS, "native"), (MOST_TAPS + 1, "reference")):
        w, x = mixer(rng, 128, 1, 2, 32, 64, taps), normal(rng, 2, 128)
        state = normal(rng, taps - 1, w.qkv.rows), normal(rng, 2, 64, 32)
        found = kernels.delta_mixer(x, w, *state, "decode")
        assert kernels.used["delta_mixer"] == kind
        qkv, _, a, b = kernels.delta_inputs(x, w, "decode")
        kernels.gated_delta(qkv, a, b, state[0], w.conv, w.a_log, w.dt_bias, state[1], 1, "decode")
        assert kernels.used["gated_delta"] == kind
        with kernels.forced("reference"):
            for part, wanted in zip(found, kernels.delta_mixer(x, w, *state, "decode"), strict=True):
                assert close(part, wanted)


def test_a_state_takes_over_the_memory_of_the_last():
    rng = np.random.default_rng(0)
    w, x = mixer(rng, 128, 16, 2, 128, 128), normal(rng, 1, 128)
    conv, state = mx.zeros((3, w.qkv.rows)), mx.zeros((32, 128, 128))
    size = state.nbytes
    mx.eval(x, conv, state, [m.arrays for m in w[:5]], w[5:9])
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(3):
        step = kernels.delta_mixer(x, w, conv, state, "decode")
        conv, state = step.conv_state, step.state
        del step
        mx.eval(conv, state)
    assert mx.get_peak_memory() - held < size


def test_a_compiled_step_that_runs_twice_before_it_is_evaluated_keeps_both_results():
    rng = np.random.default_rng(0)
    w, state = mixer(rng, 128, 1, 2, 32, 64), (mx.zeros((3, 2 * 32 + 2 * 64)), normal(rng, 2, 64, 32))
    steps = [normal(rng, 1, 128) for _ in range(2)]
    wanted = [kernels.delta_mixer(x, w, *state, "decode") for x in steps]
    mx.eval(wanted)
    compiled = mx.compile(lambda x, conv, recurrent: tuple(kernels.delta_mixer(x, w, conv, recurrent, "decode")))
    found = [compiled(x, *state) for x in steps]
    mx.eval(found)
    for parts, whole in zip(found, wanted, strict=True):
        assert all(same(part, exact) for part, exact in zip(parts, whole, strict=True))


def test_a_state_that_someone_else_holds_stays_as_it_was():
    rng = np.random.default_rng(0)
    w, x = mixer(rng, 128, 1, 2, 32, 64), normal(rng, 1, 128)
    conv, state = mx.zeros((3, w.qkv.rows)), normal(rng, 2, 64, 32)
    before = np.array(state)
    mx.eval(kernels.delta_mixer(x, w, conv, state, "decode"))
    assert np.array_equal(np.array(state), before)


def test_what_is_made_beside_a_state_outlives_it():
    rng = np.random.default_rng(0)
    w, x = mixer(rng, 128, 1, 2, 32, 64), normal(rng, 1, 128)
    conv, state = mx.zeros((3, w.qkv.rows)), normal(rng, 2, 64, 32)
    wanted = kernels.delta_mixer(x, w, conv, state, "decode").out
    mx.eval(wanted)
    alone = kernels.delta_mixer(x, w, conv, state, "decode").out
    mx.async_eval(alone)
    assert same(alone, wanted)
