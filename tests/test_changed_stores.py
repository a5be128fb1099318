"""A store that is moved, removed, rewritten or unreadable while its model runs: the run goes on right, or says so."""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

import mlx_ttd
from mlx_ttd.errors import ConfigError, OptionError, RecordError, StoreError, TokenizerError
from mlx_ttd.generation import read_generation_defaults
from mlx_ttd.observe import Counters
from mlx_ttd.store import open_store
from mlx_ttd.streaming import EmbeddingRows, embedding, machine_reading
from mlx_ttd.streaming.record_files import RecordFiles

PROMPT = "In the beginning"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return Path(shutil.copytree(mlx_ttd.demo_path(), tmp_path / "store"))


@pytest.fixture(scope="module")
def wanted() -> str:
    with mlx_ttd.load("demo", "150MB") as llm:
        return llm.generate(PROMPT, max_tokens=8).digest


def test_a_store_that_is_removed_or_moved_after_load_goes_on(store: Path, wanted: str) -> None:
    with mlx_ttd.load(store, "150MB") as llm:
        llm.generate(PROMPT, max_tokens=8)
        llm.clear_experts()
        shutil.move(store, store.with_name("moved"))
        assert llm.generate(PROMPT, max_tokens=8).digest == wanted
        assert llm.generate([1, 2, 3], max_tokens=4).text
        shutil.rmtree(store.with_name("moved"))
        llm.clear_experts()
        assert llm.generate("And " + PROMPT, max_tokens=8).tokens
        assert llm.stats().counters.misses


def test_what_was_never_opened_of_a_removed_store_is_one_sentence(store: Path) -> None:
    with mlx_ttd.load(store, "150MB") as llm:
        shutil.rmtree(store)
        with pytest.raises(TokenizerError, match=r"tokenizer\.json does not exist"):
            llm.generate(PROMPT, max_tokens=1)
        with pytest.raises(ConfigError, match="not there any more"):
            llm.generate([1, 2], max_tokens=1)
        with pytest.raises(RecordError, match=r"layer-000\.safetensors cannot be opened .*was the store moved"):
            llm.model(np.array([[1]]), cache=llm.model.make_cache())
    with pytest.raises(ConfigError, match="not there any more"):
        read_generation_defaults(store)
    with pytest.raises(StoreError, match="was the store moved"):
        EmbeddingRows(open_store(mlx_ttd.demo_path()).embedding | gone(store), None, Counters())


def gone(store: Path) -> dict:
    """The embedding of the demo model, with its file in a directory that is not there."""
    found = open_store(mlx_ttd.demo_path()).embedding
    return {name: type(info)(name, info.dtype, info.shape, store / "x", 0, info.nbytes) for name, info in found.items()}


def test_a_relative_path_is_good_after_chdir(store: Path, wanted: str, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with mlx_ttd.load("store", "150MB") as llm:
        monkeypatch.chdir("/")
        assert llm.generate(PROMPT, max_tokens=8).digest == wanted
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    (tmp_path / "work").rmdir()
    with pytest.raises(OptionError, match="relative to a directory that was removed"):
        open_store("store")


def test_the_governor_reads_the_machine_without_the_store(tmp_path: Path) -> None:
    there, missing = machine_reading(tmp_path), machine_reading(tmp_path / "nothing")
    assert missing.memory > 0
    assert missing.disk >= there.disk > 0


@pytest.mark.parametrize("read_mode", ["cached", "direct"])
@pytest.mark.parametrize("verify", ["off", "first-read"])
def test_a_record_that_is_replaced_is_noticed_whatever_is_verified(store: Path, verify: str, read_mode: str) -> None:
    """Written over in place after it was read; renamed over before its file was opened."""
    opened = open_store(store)
    stride = opened.layouts[0].stride
    path, start, _ = opened.expert_file(0)
    later, _, _ = opened.expert_file(1)
    room = np.empty(stride, np.uint8).data
    files = RecordFiles(opened, verify, read_mode)
    try:
        first = files.read(0, 3, room)
        if first.check is not None:
            room[:] = path.read_bytes()[start + 3 * stride : start + 4 * stride]
            assert first.check(room) is None
        assert files.read(0, 3, room).check is None
        with open(path, "r+b") as file:
            file.seek(start + 3 * stride)
            file.write(b"other bytes")
        changed = files.read(0, 3, room).check
        room[:] = path.read_bytes()[start + 3 * stride : start + 4 * stride]
        assert changed(room) == "its SHA-256 is not the manifest's"
        copy = later.with_name("copy")
        shutil.copy2(later, copy)
        os.replace(copy, later)
        right = files.read(1, 0, room).check
        room[:] = later.read_bytes()[start : start + stride]
        assert right(room) is None
        assert files.read(1, 0, room).check is None
    finally:
        files.close()


def test_a_replaced_record_ends_a_run_that_verifies_nothing(store: Path, wanted: str) -> None:
    with mlx_ttd.load(store, "150MB", verify="off") as llm:
        assert llm.generate(PROMPT, max_tokens=8).digest == wanted
        llm.clear_experts()
        for path in (store / "experts").iterdir():
            os.utime(path)
        assert llm.generate(PROMPT, max_tokens=8).digest == wanted
        llm.clear_experts()
        for layer in range(4):
            path, start, experts = llm.store.expert_file(layer)
            stride = llm.store.layouts[layer].stride
            with open(path, "r+b") as file:
                for expert in range(experts):
                    file.seek(start + expert * stride)
                    file.write(b"\0\1\2\3")
        with pytest.raises(RecordError, match="its SHA-256 is not the manifest's"):
            llm.generate("And " + PROMPT, max_tokens=8)


def test_looking_at_a_file_costs_no_more_than_a_part_of_a_read(store: Path) -> None:
    """20 us is a twentieth of what a record of the 35B takes at 5 GB/s; a look takes about 2."""
    files = RecordFiles(open_store(store), "off", "cached")
    room = np.empty(open_store(store).layouts[0].stride, np.uint8).data
    files.read(0, 0, room)
    fd = files._open[0][0]
    least = min(timed(lambda: files._look(0, fd)) for _ in range(200))
    files.close()
    assert least < 20e-6


def timed(call) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def test_an_embedding_row_that_cannot_be_read_is_one_sentence(store: Path, monkeypatch) -> None:
    opened = open_store(store)
    rows = EmbeddingRows(opened.embedding, opened.quantisation("embedding"), Counters())

    def broken(fd: int, offset: int, into: memoryview) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(embedding, "pread_into", broken)
        with pytest.raises(
            StoreError, match=r"embedding\.safetensors: row 7 of embedding.* cannot be read: Input/output"
        ):
            rows(np.array([7]), mlx_ttd.store.MX_DTYPES["F32"])
    assert rows(np.array([7]), mlx_ttd.store.MX_DTYPES["F32"]).shape == (1, opened.spec.hidden)
    path = next(iter(opened.embedding.values())).path
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\1")
    with pytest.raises(StoreError, match=r"embedding\.safetensors was changed after the model was loaded"):
        rows(np.array([7]), mlx_ttd.store.MX_DTYPES["F32"])
    rows.close()
