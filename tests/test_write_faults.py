"""A conversion whose disk fails says so, leaves nothing under the final name, and goes on when called again."""

from __future__ import annotations

import errno
import itertools
import os
from pathlib import Path

import pytest
from checkpoints import TEXT, tiny

from mlx_ttd.errors import ConversionError, StoreError
from mlx_ttd.store import convert, verify

SMALL = TEXT | {"num_hidden_layers": 1, "num_experts": 2, "layer_types": ["full_attention"], "vocab_size": 32}
ERRORS = {"pwrite": errno.ENOSPC, "fsync": errno.EIO, "rename": errno.EACCES, "replace": errno.ENOSPC}


class Disk:
    """One of the calls through which bytes and names reach the disk; the one with number `fails` raises."""

    def __init__(self, patch: pytest.MonkeyPatch, operation: str, fails: int | None = None):
        self.calls, real = itertools.count(), getattr(os, operation)

        def call(*arguments):
            if next(self.calls) == fails:
                raise OSError(ERRORS[operation], os.strerror(ERRORS[operation]))
            return real(*arguments)

        patch.setattr(os, operation, call)


def contents(store: Path) -> dict[str, bytes]:
    return {path.relative_to(store).as_posix(): path.read_bytes() for path in store.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return tiny(tmp_path_factory.mktemp("faults") / "src", SMALL)


@pytest.fixture(scope="module")
def whole(source) -> dict[str, bytes]:
    return contents(convert(source, source.parent / "whole"))


@pytest.mark.parametrize("operation", ERRORS)
def test_a_failure_at_whichever_call_is_said_and_the_next_call_finishes(
    operation, source, whole, tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        disk = Disk(patch, operation)
        convert(source, tmp_path / "counted")
        count = next(disk.calls)
    assert count >= 1
    for fails in {*range(0, count, 1 + count // 12), count - 1}:
        target = tmp_path / f"store-{fails}"
        with monkeypatch.context() as patch:
            Disk(patch, operation, fails)
            with pytest.raises(ConversionError, match=os.strerror(ERRORS[operation])) as error:
                convert(source, target)
        assert str(target) in str(error.value)
        assert not target.exists()
        assert contents(convert(source, target)) == whole
        assert not target.with_name(target.name + ".partial").exists()


def test_short_writes_are_continued(source, whole, tmp_path, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[: max(1, len(data) // 2)], offset))
    assert contents(convert(source, tmp_path / "store")) == whole


def test_a_disk_that_takes_no_byte_is_an_error(source, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: 0)
    with pytest.raises(ConversionError, match="takes no more bytes"):
        convert(source, tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_a_bit_that_flips_on_the_way_to_the_disk_is_found(source, tmp_path, monkeypatch):
    real, calls = os.pwrite, itertools.count()

    def flip(fd, data, offset):
        data = bytearray(data)
        if next(calls) == 1:
            data[len(data) // 2] ^= 1
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", flip)
    store = convert(source, tmp_path / "store")
    with pytest.raises(StoreError, match="does not match its digest"):
        verify(store)
