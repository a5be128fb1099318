"""The native operations against float64, against the references, and bit for bit against themselves."""

from __future__ import annotations

import logging

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_cases import Bank, exact_contributions, random_bank, random_choices, random_weight, row_error

from mlx_ttd import kernels
from mlx_ttd.kernels import native as native_part
from mlx_ttd.kernels.native import extension
from mlx_ttd.spec import Quantisation, record_layout

native = extension()
pytestmark = pytest.mark.skipif(
    native is None or mx.default_device().type != mx.DeviceType.cpu, reason="needs the native part and a CPU"
)
EXACT, ROUNDED = 1e-5, {mx.float32: 1e-5, mx.bfloat16: 2**-8, mx.float16: 2**-10}
# Below float16's least normal number its numbers lie 2^-24 apart, so that rounding to it has an absolute error as well.
SPACING = {mx.float32: 0.0, mx.bfloat16: 0.0, mx.float16: 2**-24}
X_DTYPES = st.sampled_from([mx.float32, mx.bfloat16, mx.float16])


def same(a, b):
    return a.dtype == b.dtype and bool(mx.array_equal(a.view(mx.uint8), b.view(mx.uint8)))


def error(found, exact):
    """Largest error, relative to the root mean square of what is exact."""
    return np.abs(np.array(found.astype(mx.float32)) - exact).max() / np.sqrt((exact**2).mean() + 1e-300)


def layout_of(hidden, inter, bits=4, group=64, scale_dtype="bfloat16"):
    q = Quantisation(bits, group, "affine", scale_dtype)
    return record_layout(hidden, inter, q, q)


@st.composite
def expert_cases(draw):
    group = draw(st.sampled_from([32, 64, 128]))
    hidden, inter = (group * draw(st.integers(1, 5)) for _ in range(2))
    bits, scale_dtype = draw(st.sampled_from([4, 8])), draw(st.sampled_from(["bfloat16", "float16", "float32"]))
    layout = layout_of(hidden, inter, bits, group, scale_dtype)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    experts = draw(st.integers(1, 12))
    k, tokens = draw(st.integers(1, experts)), draw(st.sampled_from([1, 2, 3, 5, 17, 97, 130]))
    bank = random_bank(layout, experts, rng, draw(st.sampled_from([0.0, 0.3])))
    x = mx.array(rng.standard_normal((tokens, hidden)).astype(np.float32)).astype(draw(X_DTYPES))
    weights = mx.array(rng.random((tokens, k)).astype(np.float32))
    return layout, bank, x, random_choices(tokens, k, experts, rng), weights


@settings(max_examples=60)
@given(expert_cases())
def test_experts_against_float64_and_the_reference(case):
    layout, bank, x, rows, weights = case
    with kernels.forced("native"):
        found = kernels.expert_contributions(x, bank, rows, layout)
        fused = kernels.expert_ffn(x, bank, rows, weights, layout)
        start = mx.random.normal(x.shape)
        added = kernels.expert_ffn_accumulate(start, x, bank, rows, weights, layout)
        together = kernels.combine(found, weights)
    with kernels.forced("reference"):
        reference = kernels.expert_contributions(x, bank, rows, layout)
        combined = kernels.combine(found, weights)
    exact = exact_contributions(x, bank, rows, layout)
    assert error(found, exact) < EXACT
    # By rows: single numbers of MLX's own product are off by 1.6e-5 here and there.
    assert row_error(found, np.array(reference)) < EXACT
    assert same(fused, combined)
    assert same(together, combined)
    total = np.array(start) + np.einsum("tkh,tk->th", exact, np.array(weights).astype(np.float64))
    assert error(added, total) < EXACT


@settings(max_examples=25)
@given(expert_cases(), st.data())
def test_an_expert_row_depends_on_nothing_but_itself(case, data):
    layout, bank, x, rows, weights = case
    picked = mx.array(data.draw(st.lists(st.integers(0, x.shape[0] - 1), min_size=1, max_size=5)))
    with kernels.forced("native"):
        whole = kernels.expert_ffn(x, bank, rows, weights, layout)
        alone = kernels.expert_ffn(x[picked], bank, rows[picked], weights[picked], layout)
        prefill = kernels.expert_ffn_accumulate(mx.zeros_like(whole), x, bank, rows, weights, layout)
    assert same(whole[picked], alone)
    assert bool(mx.array_equal(whole, prefill))


def test_a_long_prefill_against_float64():
    rng = np.random.default_rng(9)
    layout = layout_of(128, 64)
    bank = random_bank(layout, 8, rng)
    x = mx.array(rng.standard_normal((4096, 128)).astype(np.float32))
    rows, weights = random_choices(4096, 2, 8, rng), mx.array(rng.random((4096, 2)).astype(np.float32))
    with kernels.forced("native"):
        found = kernels.expert_ffn_accumulate(mx.zeros_like(x), x, bank, rows, weights, layout)
        halves = [
            kernels.expert_ffn_accumulate(mx.zeros((n.stop - n.start, 128)), x[n], bank, rows[n], weights[n], layout)
            for n in (slice(0, 1300), slice(1300, 4096))
        ]
    assert error(found, np.einsum("tkh,tk->th", exact_contributions(x, bank, rows, layout), np.array(weights))) < EXACT
    assert same(found, mx.concatenate(halves))


def test_leases_in_ascending_order_add_up_to_one():
    rng = np.random.default_rng(0)
    layout = layout_of(128, 64)
    bank = random_bank(layout, 12, rng)
    x, start = (mx.array(rng.standard_normal((40, 128)).astype(np.float32)) for _ in range(2))
    rows, weights = random_choices(40, 4, 12, rng), mx.array(rng.random((40, 4)).astype(np.float32))
    acc = start
    with kernels.forced("native"):
        for low, high in ((0, 5), (5, 6), (6, 12)):
            held = mx.where((mx.arange(12) >= low) & (mx.arange(12) < high), bank.slot_of, -1)
            acc = kernels.expert_ffn_accumulate(acc, x, Bank(bank.records, held), rows, weights, layout)
        assert same(acc, kernels.expert_ffn_accumulate(start, x, bank, rows, weights, layout))


FORMS = st.sampled_from(["int4", "int8", "bfloat16", "float16", "float32"])


@settings(max_examples=80)
@given(FORMS, st.integers(1, 150), st.integers(1, 300), st.sampled_from([32, 64, 128]), X_DTYPES, st.data())
def test_products_against_float64_and_the_reference(form, out, cols, group, dtype, data):
    cols = cols // 4 * 32 + group if form.startswith("int") else cols
    cols = cols // group * group if form.startswith("int") else cols
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    weight, exact = random_weight(out, cols, form, rng, group)
    tokens = data.draw(st.sampled_from([1, 2, 3, 7, 40, 100]))
    x = mx.array(rng.standard_normal((tokens, cols)).astype(np.float32)).astype(dtype)
    start = data.draw(st.integers(0, out - 1))
    window = (start, data.draw(st.integers(start + 1, out)))
    with kernels.forced("native"):
        logits = kernels.head(x, weight, None, "decode")
        part = kernels.head(x, weight, window, "decode")
        found = kernels.linear(x, weight, "verify")
        row = kernels.linear(x[tokens // 2 :][:1], weight, "decode")
        prefill = kernels.linear(x, weight, "prefill")
        prefill_row = kernels.linear(x[tokens // 2 :][:1], weight, "prefill")
    wanted = np.array(x.astype(mx.float32)).astype(np.float64) @ exact.T
    scale = np.abs(np.array(x.astype(mx.float32))).max(axis=1, keepdims=True) * np.abs(exact).sum(axis=1)
    assert (np.abs(np.array(logits) - wanted) <= 2e-6 * scale).all()
    for product in (found, prefill):
        off = np.abs(np.array(product.astype(mx.float32)) - wanted)
        assert (off <= ROUNDED[dtype] * (np.abs(wanted) + scale * 1e-2) + SPACING[dtype] / 2).all()
    assert same(part, logits[:, window[0] : window[1]])
    assert same(found, logits.astype(dtype))
    assert same(row, found[tokens // 2 :][:1])
    assert same(prefill_row, prefill[tokens // 2 :][:1])
    with kernels.forced("reference"):
        reference = kernels.linear(x.astype(mx.float32), weight, "decode")
    assert (np.abs(np.array(logits) - np.array(reference)) <= 4e-6 * scale).all()


@pytest.fixture
def restored():
    isa, threads = native.isa(), native.threads()
    yield
    native.set_isa(isa)
    native.set_threads(threads)


def every_result():
    rng = np.random.default_rng(5)
    results = []
    for bits, group in ((4, 64), (4, 32), (8, 64)):
        layout = layout_of(256, 192, bits, group)
        bank = random_bank(layout, 16, rng, 0.1)
        for tokens in (1, 3, 120):
            x = mx.array(rng.standard_normal((tokens, 256)).astype(np.float32))
            rows, weights = random_choices(tokens, 4, 16, rng), mx.array(rng.random((tokens, 4)).astype(np.float32))
            results.append(kernels.expert_ffn(x, bank, rows, weights, layout))
            results += [
                kernels.linear(x, random_weight(200, 256, form, np.random.default_rng(6))[0], "prefill")
                for form in ("int4", "int8", "bfloat16", "float32")
            ]
    mx.eval(results)
    return results


@pytest.mark.usefixtures("restored")
def test_thread_counts_change_no_bit():
    with kernels.forced("native"):
        expected = every_result()
        for threads in (1, 2, 3, 8):
            native.set_threads(threads)
            assert all(same(a, b) for a, b in zip(every_result(), expected, strict=True)), threads


@pytest.mark.usefixtures("restored")
def test_instruction_sets_agree():
    """AVX2 and AVX-512 to the last bit; the portable form, which may lack a fused multiply-add, and tiles to 1e-5."""
    with kernels.forced("native"):
        by_isa = {}
        for isa in native.isas():
            native.set_isa(isa)
            assert native.isa() == isa
            by_isa[isa] = every_result()
    for isa, results in by_isa.items():
        for found, portable in zip(results, by_isa["portable"], strict=True):
            assert error(found, np.array(portable).astype(np.float64)) < EXACT, isa
    if "avx512" in by_isa:
        assert all(same(a, b) for a, b in zip(by_isa["avx512"], by_isa["avx2"], strict=True))


def test_strided_and_lazy_inputs():
    rng = np.random.default_rng(1)
    weight, _ = random_weight(96, 128, "int4", rng)
    wide = mx.array(rng.standard_normal((6, 256)).astype(np.float32))
    with kernels.forced("native"):
        straight = kernels.linear(mx.array(np.array(wide)[::2, ::2]), weight, "decode")
        assert same(kernels.linear(wide[::2, ::2], weight, "decode"), straight)
        assert same(kernels.linear((wide[::2, ::2] * 2) / 2, weight, "decode"), straight)
        turned = kernels.Weight(mx.array(rng.standard_normal((128, 40)).astype(np.float32)).T)
        copied = kernels.Weight(mx.array(np.ascontiguousarray(np.array(turned.weight))))
        assert same(kernels.linear(wide[:, :128], turned, "decode"), kernels.linear(wide[:, :128], copied, "decode"))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_with_a_number_that_is_not_finite_poisons_itself_alone(bad):
    rng = np.random.default_rng(2)
    x = rng.standard_normal((3, 128)).astype(np.float32)
    clean = mx.array(x)
    x[1, 77] = bad
    for form in ("int4", "int8", "float32"):
        weight, _ = random_weight(64, 128, form, rng)
        with kernels.forced("native"):
            found, wanted = (kernels.linear(a, weight, "decode") for a in (mx.array(x), clean))
        assert not np.isfinite(np.array(found[1])).any()
        assert same(found[::2], wanted[::2])


def test_tiny_activations_are_kept_and_tinier_ones_are_zero_before_4_bit_codes():
    rng = np.random.default_rng(3)
    x = rng.standard_normal((1, 128))
    for form in ("int4", "float32"):
        weight, exact = random_weight(64, 128, form, rng)
        with kernels.forced("native"):
            small = kernels.linear(mx.array((x * 2.0**-90).astype(np.float32)), weight, "decode")
            tiny = kernels.linear(mx.array((x * 2.0**-130).astype(np.float32)), weight, "decode")
        assert error(small, (x * 2.0**-90) @ exact.T) < EXACT
        assert bool((tiny == 0).all()) == (form == "int4")


def valid_call():
    rng = np.random.default_rng(4)
    layout = layout_of(64, 64)
    bank = random_bank(layout, 4, rng)
    x = mx.zeros((2, 64))
    return {
        "x": x,
        "bank": bank,
        "rows": mx.array([[0, 1], [2, 3]], dtype=mx.int32),
        "weights": mx.ones((2, 2)),
        "layout": layout,
    }


def run_native(call):
    with kernels.forced("native"):
        mx.eval(kernels.expert_ffn(call["x"], call["bank"], call["rows"], call["weights"], call["layout"]))


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: {"bank": Bank(c["bank"].records[:, :1000], c["bank"].slot_of)}, "shorter than its layout"),
        (lambda c: {"bank": Bank(c["bank"].records[:3], c["bank"].slot_of)}, "slot is outside"),
        (lambda c: {"bank": Bank(c["bank"].records, mx.array([0, 1, 2, -2]))}, "slot is outside"),
        (lambda c: {"rows": mx.array([[0, 4], [2, 3]], dtype=mx.int32)}, "outside slot_of"),
        (lambda c: {"rows": mx.array([[-1, 1], [2, 3]], dtype=mx.int32)}, "outside slot_of"),
        (lambda c: {"rows": c["rows"].astype(mx.int64)}, "int32"),
        (lambda c: {"rows": c["rows"][:1]}, "int32"),
        (lambda c: {"weights": mx.ones((2, 3))}, "weights"),
        (lambda c: {"weights": mx.ones((2, 2), dtype=mx.bfloat16)}, "weights"),
        (lambda c: {"x": mx.zeros((2, 32))}, "x must be"),
        (lambda c: {"bank": Bank(c["bank"].records.view(mx.uint32), c["bank"].slot_of)}, "uint8"),
    ],
)
def test_a_call_that_does_not_fit_raises(change, message, lazy):
    call = valid_call()
    run_native(call)
    call |= change(call)
    if lazy:
        call["rows"] = call["rows"] + mx.zeros((1,), dtype=call["rows"].dtype)
    else:
        mx.eval(call["rows"])
    with pytest.raises((ValueError, RuntimeError), match=message):
        run_native(call)


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        ("float32", lambda w: w, "x must be"),
        ("int4", lambda w: kernels.Weight(w.weight, w.scales[:-1], w.biases, 4, 64, "affine"), "Scales and biases"),
        ("int4", lambda w: kernels.Weight(w.weight.view(mx.int32), w.scales, w.biases, 4, 64, "affine"), "uint32"),
        ("int4", lambda w: kernels.Weight(w.weight, w.scales, w.biases.astype(mx.float16), 4, 64, "affine"), "dtype"),
    ],
)
def test_a_product_that_does_not_fit_raises(form, change, message):
    weight, _ = random_weight(32, 128, form, np.random.default_rng(0))
    with kernels.forced("native"), pytest.raises(ValueError, match=message):
        kernels.linear(mx.zeros((1, 128 if form == "int4" else 64)), change(weight), "decode")


def test_a_window_outside_the_weight_raises():
    weight, _ = random_weight(32, 64, "float32", np.random.default_rng(0))
    for window in ((0, 33), (-1, 4), (5, 4)):
        with kernels.forced("native"), pytest.raises(ValueError, match="window"):
            kernels.head(mx.zeros((1, 64)), weight, window, "decode")


def test_bad_options_raise():
    with pytest.raises(ValueError, match="instruction set"):
        native.set_isa("sse9")
    with pytest.raises(ValueError, match="thread"):
        native.set_threads(0)


def test_another_mlx_steps_aside_and_says_so_once(monkeypatch, caplog):
    weight, exact = random_weight(8, 64, "float32", np.random.default_rng(0))
    monkeypatch.setattr(native_part, "_built_for", lambda: "0.0.1")
    extension.cache_clear()
    try:
        with caplog.at_level(logging.WARNING, "mlx_ttd"):
            for _ in range(2):
                found = kernels.linear(mx.ones((1, 64)), weight, "decode")
        assert kernels.used["linear"] == "reference"
        assert error(found, exact.sum(axis=1)) < EXACT
        assert [record.getMessage().count("built for mlx 0.0.1") for record in caplog.records] == [1]
    finally:
        extension.cache_clear()
