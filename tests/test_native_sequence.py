"""Native attention, gated delta rule, norms and router: against float64, the references, and their own bits."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_cases import row_error

from mlx_ttd import kernels
from mlx_ttd.kernels import Weight
from mlx_ttd.kernels.kept_rows import plain, rows_parts
from mlx_ttd.kernels.native import extension

native = extension()
pytestmark = pytest.mark.skipif(
    native is None or mx.default_device().type != mx.DeviceType.cpu, reason="needs the native part and a CPU"
)
TOLERANCE = 1e-5


def normal(rng, *shape, scale=1.0):
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def same(left, right):
    return all(bool(mx.array_equal(a.view(mx.uint8), b.view(mx.uint8))) for a, b in zip(left, right, strict=True))


def delta_inputs(rng, tokens, key_heads=2, repeats=2, dim=32, value_dim=16, taps=4):
    heads = key_heads * repeats
    channels = 2 * key_heads * dim + heads * value_dim
    return {
        "qkv": normal(rng, tokens, channels),
        "a": normal(rng, tokens, heads),
        "b": normal(rng, tokens, heads),
        "conv_state": normal(rng, taps - 1, channels),
        "conv_weight": normal(rng, channels, taps, scale=0.5),
        "a_log": normal(rng, heads),
        "dt_bias": normal(rng, heads),
        "state": normal(rng, heads, value_dim, dim, scale=0.3),
        "key_heads": key_heads,
    }


def delta(inputs, mode="prefill"):
    arrays = {k: mx.array(v) if isinstance(v, np.ndarray) else v for k, v in inputs.items()}
    return kernels.gated_delta(**arrays, mode=mode)


def exact_delta(qkv, a, b, conv_state, conv_weight, a_log, dt_bias, state, key_heads):
    """The recurrence as models write it, in float64."""
    heads, value_dim, dim = state.shape
    x = np.concatenate([conv_state, qkv]).astype(np.float64)
    taps = conv_weight.shape[1]
    mixed = sum(x[j : j + len(qkv)] * conv_weight[:, j] for j in range(taps))
    mixed = mixed * sigmoid(mixed)
    width = key_heads * dim
    q, k, v = np.split(mixed, [width, 2 * width], axis=-1)
    q, k = (p.reshape(-1, key_heads, dim) for p in (q, k))
    q, k = (p / np.sqrt((p * p).sum(-1, keepdims=True) + 1e-6) for p in (q, k))
    v = v.reshape(-1, heads, value_dim)
    decay = np.exp(-np.exp(np.float64(a_log)) * np.logaddexp(np.float64(a) + dt_bias, 0))
    beta, state, out = sigmoid(np.float64(b)), np.float64(state), []
    for t in range(len(qkv)):
        rows = []
        for h in range(heads):
            kh, qh = k[t, h * key_heads // heads], q[t, h * key_heads // heads] * dim**-0.5
            s = state[h] * decay[t, h]
            s = s + np.outer((v[t, h] - s @ kh) * beta[t, h], kh)
            state[h] = s
            rows.append(s @ qh)
        out.append(rows)
    return np.array(out), x[-(taps - 1) :], state


@settings(max_examples=25)
@given(
    tokens=st.sampled_from([1, 2, 5, 33, 70]),
    key_heads=st.integers(1, 3),
    repeats=st.integers(1, 3),
    dim=st.sampled_from([8, 16, 24, 32, 128]),
    value_dim=st.sampled_from([4, 10, 16, 128]),
    seed=st.integers(0, 2**32),
)
def test_the_delta_rule_against_float64_and_the_reference(tokens, key_heads, repeats, dim, value_dim, seed):
    check_delta(delta_inputs(np.random.default_rng(seed), tokens, key_heads, repeats, dim, value_dim))


def test_a_query_at_right_angles_to_the_state_is_held_to_what_its_sum_can_resolve():
    """Met at random: the decay leaves one key's outer product, and the query cancels with that key to a fortieth."""
    check_delta(delta_inputs(np.random.default_rng(579), 1, 1, 1, 128, 10))


def check_delta(inputs):
    found, exact = delta(inputs), exact_delta(**inputs)
    with kernels.forced("reference"):
        reference = delta(inputs)
    dim = inputs["state"].shape[-1]
    # A row of the state times a query of length dim**-0.5 has this size where the two point anywhere.
    unaligned = np.sqrt((exact[2] ** 2).sum(axis=(1, 2)).mean()) / dim
    for wanted in (exact, reference):
        for part, goal, least in zip(found, wanted, (unaligned, 0.0, 0.0), strict=True):
            assert row_error(part, np.array(goal), least) < TOLERANCE


@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(0, 2**32))
@settings(max_examples=15)
def test_any_split_of_a_prefill_equals_the_steps(lengths, seed):
    inputs = delta_inputs(np.random.default_rng(seed), sum(lengths))
    whole = delta(inputs)
    out, rest, start = [], inputs, 0
    for length in lengths:
        rows = {name: inputs[name][start : start + length] for name in ("qkv", "a", "b")}
        part = delta({**rest, **rows}, "decode" if length == 1 else "prefill")
        out.append(part.out)
        rest = {**rest, "conv_state": np.array(part.conv_state), "state": np.array(part.state)}
        start += length
    assert same(whole, (mx.concatenate(out), part.conv_state, part.state))


def attend(rng, rows, offset, heads=4, kv_heads=2, dim=32, gated=True, dtype=mx.float32, extra=3):
    length = offset + rows + extra
    q, gate = (mx.array(normal(rng, rows, heads, dim)) for _ in range(2))
    keys, values = (mx.array(normal(rng, kv_heads, length, dim)).astype(dtype) for _ in range(2))
    return q, keys, values, offset, gate if gated else None, dim**-0.5


def exact_attention(q, keys, values, offset, gate, scale):
    q, keys, values = (np.float64(np.array(a.astype(mx.float32))) for a in (q, keys, values))
    out = np.zeros_like(q)
    for i in range(q.shape[0]):
        for h in range(q.shape[1]):
            kv = h * keys.shape[0] // q.shape[1]
            scores = keys[kv, : offset + i + 1] @ q[i, h] * scale
            weights = np.exp(scores - scores.max())
            out[i, h] = weights @ values[kv, : offset + i + 1] / weights.sum()
    if gate is not None:
        out = out * sigmoid(np.float64(np.array(gate)))
    return out.reshape(len(q), -1)


@settings(max_examples=25)
@given(
    rows=st.sampled_from([1, 2, 7, 40]),
    offset=st.sampled_from([0, 1, 31, 300]),
    shape=st.sampled_from([(4, 2), (6, 1), (3, 3), (16, 2)]),
    dim=st.sampled_from([16, 24, 64, 256]),
    gated=st.booleans(),
    dtype=st.sampled_from([mx.float32, mx.bfloat16, mx.float16]),
    seed=st.integers(0, 2**32),
)
def test_attention_against_float64_and_the_reference(rows, offset, shape, dim, gated, dtype, seed):
    case = attend(np.random.default_rng(seed), rows, offset, *shape, dim, gated, dtype)
    found = kernels.attention(*case, "prefill")
    assert row_error(found, exact_attention(*case)) < TOLERANCE
    with kernels.forced("reference"):
        assert row_error(found, np.array(kernels.attention(*case, "prefill"))) < TOLERANCE


@given(st.integers(0, 40), st.integers(1, 39), st.integers(0, 2**32))
@settings(max_examples=15)
def test_an_attention_row_depends_on_nothing_but_itself(offset, cut, seed):
    q, keys, values, offset, gate, scale = attend(np.random.default_rng(seed), 40, offset)
    whole = kernels.attention(q, keys, values, offset, gate, scale, "prefill")
    first = kernels.attention(q[:cut], keys, values, offset, gate[:cut], scale, "prefill")
    rest = kernels.attention(q[cut:], keys, values, offset + cut, gate[cut:], scale, "prefill")
    last = kernels.attention(q[39:], keys, values, offset + 39, gate[39:], scale, "decode")
    assert same((whole, whole[39:]), (mx.concatenate([first, rest]), last))


@pytest.mark.parametrize(
    ("key_form", "value_form"),
    [(mx.float32, mx.bfloat16), (mx.bfloat16, mx.float16), (32, 64), (64, 32), (64, mx.bfloat16), (mx.float32, 64)],
)
@pytest.mark.parametrize("rows", [1, 7])
def test_keys_of_another_form_than_the_values_are_left_to_the_reference(key_form, value_form, rows):
    def kept(numbers, form):
        return kernels.quantise_rows(numbers, form) if isinstance(form, int) else numbers.astype(form)

    q, keys, values, offset, gate, scale = attend(np.random.default_rng(rows), rows, 300, dim=64)
    keys, values = kept(keys, key_form), kept(values, value_form)
    found = kernels.attention(q, keys, values, offset, gate, scale, "prefill")
    assert kernels.used["attention"] == "reference"
    exact = exact_attention(q, plain(keys, offset + rows), plain(values, offset + rows), offset, gate, scale)
    assert row_error(found, exact) < TOLERANCE
    with pytest.raises(ValueError, match="keys and values must be"):
        native.attention(q, rows_parts(keys), rows_parts(values), offset, gate, scale)


@pytest.mark.parametrize("width", [5, 16, 64, 130, 2048])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_norms_against_float64(width, dtype):
    rng = np.random.default_rng(width)
    x, z = (mx.array(normal(rng, 3, 4, width)).astype(dtype) for _ in range(2))
    w = mx.array(normal(rng, width))
    x64, z64, w64 = (np.float64(np.array(a.astype(mx.float32))) for a in (x, z, w))
    exact = x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + 1e-6) * w64
    gated = exact * z64 * sigmoid(z64)
    # A bf16 result is the exact one rounded to 8 bits.
    bound = {"rtol": 2**-8 if dtype == mx.bfloat16 else 0, "atol": TOLERANCE * np.abs(gated).max()}
    np.testing.assert_allclose(np.array(kernels.rms_norm(x, w, 1e-6).astype(mx.float32)), exact, **bound)
    np.testing.assert_allclose(np.array(kernels.gated_rms_norm(x, z, w, 1e-6).astype(mx.float32)), gated, **bound)


@pytest.mark.parametrize(("dim", "rotated"), [(64, 16), (256, 64), (32, 32)])
def test_norm_and_rotation_against_float64(dim, rotated):
    rng = np.random.default_rng(dim)
    x, w, offset, theta = mx.array(normal(rng, 5, 3, dim)), mx.array(normal(rng, dim)), 1000, 1e7
    x64 = np.float64(np.array(x))
    exact = x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + 1e-6) * np.float64(np.array(w))
    angles = (offset + np.arange(5))[:, None] * theta ** (-np.arange(0, rotated, 2) / rotated)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    half = rotated // 2
    left, right = exact[..., :half].copy(), exact[..., half:rotated].copy()
    exact[..., :half], exact[..., half:rotated] = left * cos - right * sin, right * cos + left * sin
    # Positions of a thousand times an f32 frequency: the angle itself is rounded, in every implementation.
    assert row_error(kernels.norm_rope(x, w, 1e-6, rotated, theta, offset), exact) < 2e-4


@pytest.mark.parametrize("shape", [(2, 0, 64), (0, 3, 64), (0, 0, 64)])
def test_norm_and_rotation_of_no_head_or_token(shape):
    found = kernels.norm_rope(mx.zeros(shape), mx.ones((64,)), 1e-6, 32, 1e4, 0)
    assert np.array(found).shape == shape
    assert kernels.used["norm_rope"] == "native"


@settings(max_examples=25)
@given(
    st.integers(1, 9),
    st.sampled_from([4, 24, 100, 256, 512]),
    st.integers(1, 8),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_the_router_against_float64(rows, experts, k, packed, seed):
    rng, k = np.random.default_rng(seed), min(k, experts)
    x, w = mx.array(normal(rng, rows, 128)), mx.array(normal(rng, experts, 128, scale=0.3))
    weight = Weight(*mx.quantize(w, 64, 8), 8, 64, "affine") if packed else Weight(w)
    dense = mx.dequantize(weight.weight, weight.scales, weight.biases, 64, 8) if packed else w
    ids, weights = (np.array(a) for a in kernels.router(x, weight, k, "decode" if rows == 1 else "prefill"))
    logits = np.float64(np.array(x)) @ np.float64(np.array(dense)).T
    probabilities = np.exp(logits - logits.max(-1, keepdims=True))
    order = np.sort(-probabilities, axis=-1)
    clear = (order[:, k - 1] / order[:, k] > 1 + 1e-5) if k < experts else np.full(rows, True)
    exact = np.sort(np.argsort(-probabilities, axis=-1, kind="stable")[:, :k], axis=-1)
    assert (ids[clear] == exact[clear]).all()
    assert (np.diff(ids, axis=-1) > 0).all()
    chosen = np.take_along_axis(probabilities, exact, -1)
    np.testing.assert_allclose(weights[clear], (chosen / chosen.sum(-1, keepdims=True))[clear], rtol=1e-4)


def test_router_ties_go_to_the_lowest_id():
    x = mx.ones((2, 32))
    ids, weights = kernels.router(x, Weight(mx.zeros((40, 32))), 4, "decode")
    assert ids.tolist() == [[0, 1, 2, 3]] * 2
    assert weights.tolist() == [[0.25] * 4] * 2


def everything(rng):
    case = attend(rng, 33, 7)
    w = Weight(mx.array(normal(rng, 100, 128)))
    x = mx.array(normal(rng, 33, 128))
    return [
        *delta(delta_inputs(rng, 40)),
        kernels.attention(*case, "prefill"),
        kernels.rms_norm(x, mx.array(normal(rng, 128)), 1e-6),
        *kernels.router(x, w, 5, "prefill"),
    ]


def test_thread_counts_change_no_bit():
    before = native.threads()
    try:
        found = []
        for count in (1, 2, 3, 8):
            native.set_threads(count)
            found.append(everything(np.random.default_rng(3)))
            mx.eval(found[-1])
        assert all(same(found[0], other) for other in found[1:])
    finally:
        native.set_threads(before)


def test_instruction_sets_agree():
    before, found = native.isa(), {}
    try:
        for isa in ("portable", "avx2", "avx512"):
            try:
                native.set_isa(isa)
            except (RuntimeError, ValueError):
                continue
            found[isa] = [np.array(a, np.float64) for a in everything(np.random.default_rng(4))]
    finally:
        native.set_isa(before)
    base = found.pop("portable")
    for other in found.values():
        assert max(row_error(a, b) for a, b in zip(base, other, strict=True)) < TOLERANCE
