"""Native packing has mx.quantize's very bits: codes, scales and biases, on every instruction set."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_ttd import kernels
from mlx_ttd.kernels.native import extension

native = extension()
pytestmark = pytest.mark.skipif(
    native is None or mx.default_device().type != mx.DeviceType.cpu, reason="needs the native part and a CPU"
)
DTYPES = {mx.float32: np.float32, mx.bfloat16: np.uint16, mx.float16: np.float16}
FORMS = [(bits, group) for bits in (4, 8) for group in (32, 64, 128)]
SPECIAL = [0.0, -0.0, np.nan, np.inf, -np.inf, 1e-45, -1e-38, 5e-8, 1e-7, 1.0, -1.0, 65504.0, 65520.0, 3e38, -3e38]


def host(array: mx.array) -> np.ndarray:
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def packed(kind: str, values: np.ndarray, bits: int, group: int, scale_dtype: type) -> list[np.ndarray]:
    rows, cols = values.shape
    parts = [np.full((rows, cols * bits // 32), 77, np.uint32)]
    parts += [np.full((rows, cols // group), 7, scale_dtype) for _ in range(2)]
    with kernels.forced(kind):
        kernels.quantize(values, bits, group, *parts)
    return parts


def check(values: np.ndarray, dtype: mx.Dtype, bits: int, group: int) -> None:
    array = mx.array(values).astype(dtype)
    wanted = [host(part) for part in mx.quantize(array, group, bits)]
    for kind in ("native", "reference"):
        found = packed(kind, host(array), bits, group, DTYPES[dtype])
        assert all(same(a, b) for a, b in zip(found, wanted, strict=True)), kind


@st.composite
def numbers(draw: st.DrawFn) -> np.ndarray:
    """f32 [rows, 384 n]: of one magnitude, of any bits, or close to ties between codes; some of them special."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = draw(st.integers(1, 19)), 384 * draw(st.integers(1, 2))
    kind = draw(st.sampled_from(["normal", "bits", "ties", "constant"]))
    if kind == "bits":
        values = rng.integers(0, 2**32, shape, dtype=np.uint32).view(np.float32)
    elif kind == "ties":
        values = (np.round(rng.standard_normal(shape) * rng.choice([1, 2, 8])) * rng.choice([0.5, 1, 0.1])).astype("f4")
    else:
        values = rng.standard_normal(shape if kind == "normal" else (shape[0], 1)).astype(np.float32)
        values = np.broadcast_to(values, shape) * np.float32(10.0 ** draw(st.integers(-42, 37)))
    few = draw(st.lists(st.sampled_from(SPECIAL), min_size=1, max_size=3))
    chosen = rng.random(shape) < draw(st.sampled_from([0.0, 0.01, 0.1, 1.0]))
    return np.where(chosen, rng.choice(np.array(few, np.float32), shape), values).astype(np.float32)


@pytest.fixture(scope="module", params=native.isas() if native else [])
def isa(request: pytest.FixtureRequest):
    before = native.isa()
    native.set_isa(request.param)
    yield request.param
    native.set_isa(before)


@settings(max_examples=60)
@given(numbers(), st.sampled_from(list(DTYPES)), st.sampled_from(FORMS))
def test_the_bits_of_mlx(isa: str, values: np.ndarray, dtype: mx.Dtype, form: tuple[int, int]) -> None:
    check(values, dtype, *form)


@pytest.mark.parametrize("scale", [1e-9, 1e-6, 0.02, 1.0, 1e4])
@pytest.mark.parametrize("form", FORMS)
def test_a_million_numbers(isa: str, form: tuple[int, int], scale: float) -> None:
    values = np.random.default_rng(0).standard_normal((256, 384), np.float32) * np.float32(scale)
    for dtype in DTYPES:
        check(values, dtype, *form)


@pytest.mark.parametrize("kind", ["native", "reference"])
def test_scales_of_another_dtype_are_rounded_last(kind: str) -> None:
    values = np.random.default_rng(1).standard_normal((5, 128), np.float32)
    codes, scales, biases = mx.quantize(mx.array(values), 64, 4)
    found = packed(kind, values, 4, 64, np.uint16)
    wanted = [host(part) for part in (codes, scales.astype(mx.bfloat16), biases.astype(mx.bfloat16))]
    assert all(same(a, b) for a, b in zip(found, wanted, strict=True))


def test_it_is_what_runs_and_other_widths_fall_back() -> None:
    values = np.ones((2, 128), np.float32)
    for bits, kind in ((4, "native"), (8, "native"), (3, "reference")):
        parts = np.empty((2, 4 * bits), np.uint32), np.empty((2, 2), np.uint16), np.empty((2, 2), np.uint16)
        kernels.quantize(values, bits, 64, *parts)
        assert kernels.used["quantize"] == kind


def test_values_that_lie_at_an_odd_address() -> None:
    values = np.random.default_rng(2).standard_normal((3, 64), np.float32)
    odd = np.zeros(values.nbytes + 1, np.uint8)[1:]
    odd[:] = values.view(np.uint8).reshape(-1)
    found = packed("native", odd.view(np.float32).reshape(values.shape), 4, 64, np.float32)
    assert all(same(a, b) for a, b in zip(found, packed("native", values, 4, 64, np.float32), strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 3}, "4 or 8 bits"),
        ({"group": 16}, "32, 64 or 128"),
        ({"values": np.zeros((2, 96), np.float32)}, "divide into groups"),
        ({"values": np.zeros((2, 64), np.int32)}, "Numbers must be"),
        ({"codes": np.zeros((2, 9), np.uint32)}, "as many as hold"),
        ({"codes": np.zeros((2, 8), np.int32)}, "uint32"),
        ({"scales": np.zeros((2, 2), np.uint16)}, "one a group"),
        ({"biases": np.zeros((2, 1), np.float32)}, "one dtype"),
        ({"biases": np.zeros(9, np.uint8)[1:5].view(np.uint16).reshape(2, 1)}, "aligned"),
    ],
)
def test_a_call_that_does_not_fit_raises(change: dict, message: str) -> None:
    call = {"values": np.zeros((2, 64), np.float32), "bits": 4, "group": 64, "codes": np.zeros((2, 8), np.uint32)}
    call |= {"scales": np.zeros((2, 1), np.uint16), "biases": np.zeros((2, 1), np.uint16)}
    native.quantize_into(**call)
    with pytest.raises(ValueError, match=message):
        native.quantize_into(**call | change)


@pytest.mark.parametrize("strided", [0, 1, 2])
def test_a_part_that_does_not_lie_together_is_left_to_the_reference(strided: int) -> None:
    values = np.random.default_rng(3).standard_normal((4, 128), np.float32)
    wanted = packed("native", values, 4, 64, np.float32)
    parts = [np.zeros_like(part) for part in wanted]
    parts[strided] = np.zeros((4, 2 * parts[strided].shape[1]), parts[strided].dtype)[:, ::2]
    with pytest.raises(TypeError):
        native.quantize_into(values, 4, 64, *parts)
    kernels.quantize(values, 4, 64, *parts)
    assert kernels.used["quantize"] == "reference"
    assert all(same(a, b) for a, b in zip(parts, wanted, strict=True))


def test_a_part_that_may_not_be_written_is_refused() -> None:
    codes, scales = np.zeros((2, 8), np.uint32), np.zeros((2, 1), np.uint16)
    codes.setflags(write=False)
    with pytest.raises(TypeError):
        native.quantize_into(np.zeros((2, 64), np.float32), 4, 64, codes, scales, scales.copy())
