"""Weights and slots in huge pages: the bytes stay, and the pages are there where the system has them."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_ttd import kernels
from mlx_ttd.kernels.huge_pages import huge_page_bytes


def huge_bytes_at(address: int) -> int:
    """Bytes of huge pages under the mapping that holds an address."""
    inside = False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            first = line.split(maxsplit=1)[0]
            if "-" in first and not first.endswith(":"):
                start, stop = (int(part, 16) for part in first.split("-"))
                inside = start <= address < stop
            elif inside and first == "AnonHugePages:":
                return int(line.split()[1]) * 1024
    return 0


@pytest.mark.parametrize("dtype", [mx.uint8, mx.bfloat16, mx.uint32])
@pytest.mark.parametrize("count", [0, 7, 3_000_001])
def test_no_byte_changes(count: int, dtype: mx.Dtype) -> None:
    array = (mx.arange(count) % 251).astype(dtype)
    mx.eval(array)
    before = np.array(array.view(mx.uint8)).copy()
    kernels.in_huge_pages(array)
    assert np.array_equal(np.array(array.view(mx.uint8)), before)


@pytest.mark.skipif(not huge_page_bytes(), reason="needs huge pages")
def test_a_large_array_lies_in_huge_pages() -> None:
    array = mx.zeros(5 * huge_page_bytes(), mx.uint8)
    mx.eval(array)
    kernels.in_huge_pages(array)
    assert huge_bytes_at(np.array(array, copy=False).ctypes.data + array.nbytes // 2) >= 2 * huge_page_bytes()
