"""The reference of a packed projection: every packing and dtype against float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_ttd import kernels
from mlx_ttd.kernels import Weight

ROUNDED = {mx.float32: 2**-24, mx.bfloat16: 2**-8, mx.float16: 2**-11}


def packed(rows, cols, mode, bits, rng):
    """A weight in `mode`, and its float64 values."""
    group = 32 if mode == "mxfp4" else 64
    codes, scales, *biases = mx.quantize(
        mx.array(rng.standard_normal((rows, cols), np.float32)), group, bits, mode=mode
    )
    values = mx.dequantize(codes, scales, *biases, group_size=group, bits=bits, mode=mode, dtype=mx.float32)
    return Weight(codes, scales, biases[0] if biases else None, bits, group, mode), np.array(values, np.float64)


@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize(("mode", "bits"), [("affine", 3), ("affine", 4), ("affine", 6), ("affine", 8), ("mxfp4", 4)])
@pytest.mark.parametrize(("tokens", "step"), [(1, "decode"), (9, "verify"), (40, "prefill")])
def test_a_packed_projection_is_rounded_once(dtype, mode, bits, tokens, step):
    rng = np.random.default_rng(bits)
    w, values = packed(96, 512, mode, bits, rng)
    x = mx.array(rng.standard_normal((tokens, 512), np.float32)).astype(dtype)
    exact = np.array(x.astype(mx.float32), np.float64) @ values.T
    with kernels.forced("reference"):
        found = kernels.linear(x, w, step)
    assert found.dtype == dtype
    off = np.abs(np.array(found.astype(mx.float32)) - exact)
    assert (off <= ROUNDED[dtype] * np.abs(exact) + 1e-5 * np.sqrt((exact**2).mean())).all()
