"""A checkpoint's links stay in its directory or lead to its Hub cache; what else stands for a file is refused."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import tiny
from huggingface_hub.file_download import _create_symlink, repo_folder_name

from mlx_ttd.errors import CheckpointError
from mlx_ttd.store import convert
from mlx_ttd.store.checkpoint import open_checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A checkpoint in a Hub cache, its links made by the hub's own client."""
    source = tiny(tmp_path / "source")
    (source / "tokenizer.json").write_text("{}")
    repo = tmp_path / "cache" / repo_folder_name(repo_id="some-lab/tiny", repo_type="model")
    folder = repo / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (repo / "blobs").mkdir()
    for i, path in enumerate(sorted(source.iterdir())):
        blob = repo / "blobs" / f"{i:064x}"
        shutil.move(path, blob)
        _create_symlink(str(blob), str(folder / path.name), new_blob=True)
        assert os.readlink(folder / path.name) == f"../../blobs/{i:064x}"
    return folder


def test_a_snapshot_of_a_hub_cache_is_converted_by_any_path(snapshot: Path, tmp_path: Path) -> None:
    (tmp_path / "to-snapshot").symlink_to(snapshot)
    (tmp_path / "to-cache").symlink_to(tmp_path / "cache")
    through = tmp_path / "to-cache" / snapshot.relative_to(tmp_path / "cache")
    found = []
    for i, path in enumerate((snapshot, tmp_path / "to-snapshot", through)):
        store = convert(path, tmp_path / f"{i}.ttd")
        found.append({p.name: p.read_bytes() for p in store.rglob("*") if p.is_file() and not p.is_symlink()})
    assert found[0] == found[1] == found[2]
    assert found[0]["tokenizer.json"] == b"{}"


def test_a_snapshot_is_converted_by_a_relative_path(
    snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(snapshot.parent)
    convert(COMMIT, tmp_path / "dst")
    monkeypatch.chdir(snapshot)
    convert(".", tmp_path / "again")


def test_links_within_the_directory_are_followed(tmp_path: Path) -> None:
    source = tiny(tmp_path / "source")
    (source / "model.safetensors").rename(source / "weights")
    (source / "hop").symlink_to("weights")
    (source / "model.safetensors").symlink_to(source / "hop")
    assert open_checkpoint(source).tensors


FILES = ("config.json", "model.safetensors", "tokenizer.json")
ELSEWHERE: dict[str, Callable[[Path], str]] = {
    "beside it": lambda folder: "../../../../elsewhere",
    "an absolute path": lambda folder: str(folder.parents[3] / "elsewhere"),
    "beside the blobs": lambda folder: "../../other",
    "the blobs of another repository": lambda folder: "../../../models--other--x/blobs/b",
    "under the blobs": lambda folder: "../../blobs/deep/b",
    "another snapshot": lambda folder: "../other/b",
    "blobs that are a link": lambda folder: "../../blobs/link",
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ELSEWHERE)
def test_a_link_to_elsewhere_is_refused(snapshot: Path, tmp_path: Path, kind: str, name: str) -> None:
    repo, target = snapshot.parents[1], ELSEWHERE[kind](snapshot)
    data = (snapshot / name).read_bytes()
    for place in ("../../elsewhere", "other", "../models--other--x/blobs/b", "blobs/deep/b", "snapshots/other/b"):
        (repo / place).parent.mkdir(parents=True, exist_ok=True)
        (repo / place).write_bytes(data)
    (repo / "blobs" / "link").symlink_to(repo / "other")
    (snapshot / name).unlink()
    (snapshot / name).symlink_to(target)
    assert (snapshot / name).read_bytes() == data
    with pytest.raises(CheckpointError, match=rf"{name} is a link to .*, outside the checkpoint and its Hub cache"):
        convert(snapshot, tmp_path / "dst")
    assert not (tmp_path / "dst").exists()


def test_a_folder_called_blobs_makes_no_cache(tmp_path: Path) -> None:
    source = tiny(tmp_path / "x" / "snapshots" / "1")
    (tmp_path / "x" / "blobs").mkdir()
    (source / "model.safetensors").rename(tmp_path / "x" / "blobs" / "b")
    (source / "model.safetensors").symlink_to("../../blobs/b")
    with pytest.raises(CheckpointError, match="outside the checkpoint"):
        open_checkpoint(source)


def fifo(path: Path) -> None:
    os.mkfifo(path)


NO_FILE = "where a file is needed"
UNREADABLE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pipe": (fifo, NO_FILE),
    "a link to a pipe": (
        lambda path: (fifo(path.with_name("pipe")), path.symlink_to("pipe")),
        "where a file is needed",
    ),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "outside the checkpoint"),
    "a directory": (lambda path: path.mkdir(), NO_FILE),
    "a link to nothing": (lambda path: path.symlink_to("nothing"), "cannot be followed: No such file"),
    "a link to itself": (lambda path: path.symlink_to(path.name), "cannot be followed"),
}


@pytest.mark.parametrize("name", [*FILES, "model.safetensors.index.json", "chat_template.jinja"])
@pytest.mark.parametrize("kind", UNREADABLE)
@pytest.mark.timeout(60)
def test_what_is_no_plain_file_is_refused_before_it_is_opened(tmp_path: Path, kind: str, name: str) -> None:
    source = tiny(tmp_path / "source")
    (source / name).unlink(missing_ok=True)
    put, sentence = UNREADABLE[kind]
    put(source / name)
    with pytest.raises(CheckpointError, match=rf"{name} .*{sentence}"):
        convert(source, tmp_path / "dst")
