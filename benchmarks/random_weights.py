"""Random packed weights, made on the device, for benchmarks that no checkpoint feeds."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import mlx.core as mx
import numpy as np

from mlx_ttd.kernels import Weight
from mlx_ttd.spec import RecordLayout


def random_codes(shape: tuple[int, ...], key: int) -> mx.array:
    return mx.random.randint(0, 1 << 32, shape, mx.uint32, key=mx.random.key(key))


def random_weight(rows: int, cols: int, bits: int, key: int, dtype: mx.Dtype = mx.bfloat16) -> Weight:
    """Affine codes, group 64, of about unit gain: scale q + bias is centred, with variance 1 / cols."""
    scale = (12.0 / cols) ** 0.5 / 2**bits
    scales = mx.full((rows, cols // 64), scale, dtype)
    return Weight(
        random_codes((rows, cols * bits // 32), key), scales, scales * -(2.0 ** (bits - 1)), bits, 64, "affine"
    )


def random_records(layout: RecordLayout, slots: int, key: int) -> mx.array:
    """A bank of random experts, made on the device: records uint8 [slots, stride]."""
    parts: list[mx.array] = []
    for offset, matrix in enumerate((layout.gate_up, layout.down)):
        w = random_weight(slots * matrix.rows, matrix.cols, matrix.bits, 2 * key + offset)
        for array, start in ((w.weight, matrix.codes), (w.scales, matrix.scales), (w.biases, matrix.biases)):
            assert array is not None
            assert start is not None
            data = array.view(mx.uint8).reshape(slots, -1)
            parts.append(mx.zeros((slots, start - sum(p.shape[1] for p in parts)), mx.uint8))
            parts.append(data)
    parts.append(mx.zeros((slots, layout.stride - sum(p.shape[1] for p in parts)), mx.uint8))
    records = mx.concatenate(parts, axis=1)
    mx.eval(records)
    return records


def random_lease(layout: RecordLayout, slots: int, key: int) -> SimpleNamespace:
    """A bank of random experts, expert e in slot slots - 1 - e."""
    slot_of = mx.array(np.arange(slots, dtype=np.int32)[::-1].copy())
    return SimpleNamespace(records=random_records(layout, slots, key), slot_of=slot_of, outputs=deque(maxlen=1))
