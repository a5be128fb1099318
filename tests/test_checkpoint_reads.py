"""Large reads of a checkpoint: past the page cache, into memory that is used again only when nobody holds it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from checkpoints import MOE, hf_tensors, tiny, values, write
from hypothesis import given
from hypothesis import strategies as st

from mlx_ttd.errors import CheckpointError
from mlx_ttd.spec import model_spec
from mlx_ttd.store import checkpoint as checkpoints
from mlx_ttd.store import convert
from mlx_ttd.store.checkpoint import LARGE_READ, Checkpoint, open_checkpoint
from mlx_ttd.store.rooms import Rooms

SIZE = 3 * LARGE_READ + 12_345


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, np.ndarray]:
    """A checkpoint with one more tensor, of `SIZE` bytes, and that tensor's bytes."""
    content = np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8)
    tensors = hf_tensors(model_spec(MOE), values(model_spec(MOE))) | {"model.visual.large": ("U8", content)}
    return open_checkpoint(write(tmp_path_factory.mktemp("large") / "src", MOE, tensors)), content


def contents(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


@given(st.integers(0, SIZE - 1), st.sampled_from([1, 4096, LARGE_READ - 1, LARGE_READ, 2 * LARGE_READ + 1]))
def test_any_range_has_its_bytes(large: tuple[Checkpoint, np.ndarray], start: int, nbytes: int) -> None:
    checkpoint, content = large
    wanted = content[start : start + nbytes]
    found = checkpoint.read(checkpoint.tensors["model.visual.large"], start, len(wanted))
    np.testing.assert_array_equal(found, wanted)


def test_a_file_that_cannot_be_read_directly_is_read_all_the_same(
    large: tuple[Checkpoint, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, content = large
    real, refused = os.preadv, []

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        if not refused:
            refused.append(fd)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    info = checkpoint.tensors["model.visual.large"]
    direct, plain = checkpoint._descriptors(info.path)
    if direct == plain:
        with pytest.raises(CheckpointError, match="Invalid argument"):
            checkpoint.read(info, 5, 2 * LARGE_READ)
    else:
        np.testing.assert_array_equal(checkpoint.read(info, 5, 2 * LARGE_READ), content[5 : 5 + 2 * LARGE_READ])
        assert refused == [direct]


def test_a_file_that_was_cut_short_is_named(tmp_path: Path) -> None:
    tensors = hf_tensors(model_spec(MOE), values(model_spec(MOE)))
    tensors |= {"model.visual.large": ("U8", np.zeros(SIZE, np.uint8))}
    checkpoint = open_checkpoint(write(tmp_path / "src", MOE, tensors))
    info = checkpoint.tensors["model.visual.large"]
    os.truncate(info.path, info.offset + SIZE - 1)
    assert len(checkpoint.read(info, 0, SIZE - 1)) == SIZE - 1
    with pytest.raises(CheckpointError, match="cut short"):
        checkpoint.read(info, 0, SIZE)


def test_a_room_is_taken_again_when_its_last_view_is_gone() -> None:
    rooms = Rooms()
    first = rooms.take(LARGE_READ)
    address = first.ctypes.data
    first[:] = 7
    view = first[5:10].reshape(1, 5)
    del first
    other = rooms.take(LARGE_READ)
    assert other.ctypes.data != address
    assert address % 4096 == other.ctypes.data % 4096 == 0
    assert (view == 7).all()
    del view
    assert rooms.take(LARGE_READ - 5).ctypes.data == address


def test_a_store_is_the_same_by_large_reads_and_in_used_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny(tmp_path / "src")
    wanted = contents(convert(source, tmp_path / "wanted"))

    monkeypatch.setattr(checkpoints, "LARGE_READ", 1)
    assert contents(convert(source, tmp_path / "large")) == wanted
    real = Rooms.take

    def take(self: Rooms, nbytes: int) -> np.ndarray:
        room = real(self, nbytes)
        room[:] = 0xAA
        return room

    monkeypatch.setattr(Rooms, "take", take)
    assert contents(convert(source, tmp_path / "used")) == wanted
