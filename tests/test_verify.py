"""verify reads every byte, and names what is damaged by file, layer and expert."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from checkpoints import DENSE, MOE, hf_tensors, tiny, values, write
from test_store import poke

from mlx_ttd.errors import OptionError, RecordError, StoreError
from mlx_ttd.spec import model_spec
from mlx_ttd.store import convert, open_store, verify


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    spec = model_spec(MOE)
    tensors = hf_tensors(spec, values(spec, mtp=True))
    return convert(write(root / "src", MOE, tensors, extra={"tokenizer.json": "{}"}), root / "store")


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "store"))


@pytest.mark.parametrize("threads", [1, 4, None])
def test_a_whole_store(made: Path, threads: int | None) -> None:
    seen = []
    report = verify(made, threads, seen.append)
    manifest = open_store(made).manifest
    assert report.digest == open_store(made).digest
    assert report.records == 5 * 8
    assert report.tensors == sum(len(e.tensors or {}) for e in manifest.files.values())
    assert report.files == len(manifest.files) + 2
    assert seen[-1].done == seen[-1].total == report.bytes


def test_a_dense_store(tmp_path: Path) -> None:
    assert verify(convert(tiny(tmp_path / "src", DENSE), tmp_path / "dst")).records == 0


def test_one_flipped_bit_in_a_record(store: Path) -> None:
    path, start, _ = open_store(store).expert_file(2)
    stride = open_store(store).layouts[2].stride
    offset = start + 5 * stride + 4321
    poke(path, offset, bytes([path.read_bytes()[offset] ^ 1]))
    with pytest.raises(
        RecordError, match=r"layer-002\.safetensors: layer 2, expert 5 does not match its digest"
    ) as error:
        verify(store)
    assert "expert 4" not in str(error.value)


def test_padding_is_covered_too(store: Path) -> None:
    path, start, experts = open_store(store).expert_file(0)
    poke(path, start + experts * open_store(store).layouts[0].stride - 1, b"\1")
    with pytest.raises(RecordError, match="layer 0, expert 7"):
        verify(store)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("resident.safetensors", "tensor 'head'"),
        ("embedding.safetensors", "tensor 'embedding'"),
        ("tokenizer.json", "the file"),
    ],
)
def test_damage_elsewhere(store: Path, name: str, words: str) -> None:
    path = store / name
    poke(path, path.stat().st_size - 1, b"x" if path.read_bytes()[-1:] != b"x" else b"y")
    with pytest.raises(StoreError, match=f"{name}: {words} does not match") as error:
        verify(store)
    assert not isinstance(error.value, RecordError)


def test_everything_damaged_is_listed_within_bounds(store: Path) -> None:
    for layer in range(4):
        path, start, experts = open_store(store).expert_file(layer)
        for expert in range(experts):
            poke(path, start + expert * open_store(store).layouts[layer].stride, b"\xaa\xbb\xcc")
    with pytest.raises(RecordError, match="And 12 more"):
        verify(store)


def test_threads_out_of_range(made: Path) -> None:
    with pytest.raises(OptionError, match="threads is 0"):
        verify(made, 0)
