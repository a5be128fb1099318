"""Weights and slots in huge pages: the bytes stay, and the pages are there where the system has them."""

from __future__ import annotations

import errno
import time

import mlx.core as mx
import numpy as np
import pytest

from mlx_ttd import kernels
from mlx_ttd.kernels import huge_pages
from mlx_ttd.kernels.huge_pages import MADV_COLLAPSE, MADV_HUGEPAGE, huge_page_bytes

needs_huge_pages = pytest.mark.skipif(not huge_page_bytes(), reason="needs huge pages")


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


@needs_huge_pages
def test_a_large_array_lies_in_huge_pages() -> None:
    array = mx.zeros(5 * huge_page_bytes(), mx.uint8)
    mx.eval(array)
    kernels.in_huge_pages(array)
    assert huge_bytes_at(np.array(array, copy=False).ctypes.data + array.nbytes // 2) >= 2 * huge_page_bytes()


@needs_huge_pages
def test_a_passing_refusal_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([errno.ENOMEM] * 70 + [errno.EAGAIN, 0])
    asked = []
    monkeypatch.setattr(huge_pages, "BYTES_PER_SECOND", 1.0)
    monkeypatch.setattr(huge_pages, "_advise", lambda *call: asked.append(call) or next(answers))
    array = mx.zeros(2 * huge_page_bytes(), mx.uint8)
    mx.eval(array)
    kernels.in_huge_pages(array)
    assert len(asked) == 72
    assert len(set(asked)) == 1


@needs_huge_pages
def test_an_array_without_a_whole_huge_page_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(huge_pages, "_advise", lambda *call: asked.append(call) or errno.EINVAL)
    array = mx.zeros(huge_page_bytes(), mx.uint8)
    mx.eval(array)
    kernels.in_huge_pages(array)
    assert not asked


@needs_huge_pages
@pytest.mark.parametrize("refusal", [errno.ENOMEM, errno.EINVAL])
def test_patience_with_a_system_that_always_refuses_ends(monkeypatch: pytest.MonkeyPatch, refusal: int) -> None:
    asked = []

    def never(address: int, length: int, advice: int) -> int:
        asked.append(advice)
        time.sleep(0.001)
        return refusal

    monkeypatch.setattr(huge_pages, "BYTES_PER_SECOND", 1e9)
    monkeypatch.setattr(huge_pages, "_patience", 0.01)
    monkeypatch.setattr(huge_pages, "_advise", never)
    array = mx.zeros(8 * huge_page_bytes(), mx.uint8)
    mx.eval(array)
    kernels.in_huge_pages(array)
    assert asked[-1] == MADV_HUGEPAGE
    assert len(asked) <= 2 + 10 + array.nbytes / 1e6


@needs_huge_pages
def test_one_refused_page_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    size, moved, advised = huge_page_bytes(), [], []

    def across_two_mappings(address: int, length: int, advice: int) -> int:
        if advice == MADV_HUGEPAGE:
            advised.append((address, length))
            return 0
        assert advice == MADV_COLLAPSE
        if address <= second < address + length:
            return errno.EINVAL
        moved.append(address)
        return 0

    array = mx.zeros(5 * size, mx.uint8)
    mx.eval(array)
    first = -(-np.array(array, copy=False).ctypes.data // size) * size
    second = first + size
    monkeypatch.setattr(huge_pages, "_advise", across_two_mappings)
    kernels.in_huge_pages(array)
    assert moved[:3] == [first, first + 2 * size, first + 3 * size]
    assert [address for address, _ in advised] == [first]
