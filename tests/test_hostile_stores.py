"""Links, FIFOs, devices, Git LFS pointers and odd paths in a store: read as meant, or refused in one sentence."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from checkpoints import tiny
from typer.testing import CliRunner
from vocabulary import write_byte_tokenizer

import mlx_ttd
from mlx_ttd.cli import app
from mlx_ttd.errors import ConfigError, OptionError, StoreError, TokenizerError, TTDError
from mlx_ttd.generation import read_generation_defaults
from mlx_ttd.observe import Trace, load_trace
from mlx_ttd.plan import plan
from mlx_ttd.store import convert, info, open_store, verify
from mlx_ttd.store.checkpoint import open_checkpoint
from mlx_ttd.store.policy import load_policy
from mlx_ttd.text import Tokenizer

COPIED = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
OWN = ("manifest.json", "resident.safetensors", "embedding.safetensors", "experts/layer-001.safetensors")
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return Path(shutil.copytree(mlx_ttd.demo_path(), tmp_path / "store"))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write_byte_tokenizer(tiny(tmp_path / "checkpoint"))
    return tmp_path / "checkpoint"


def move_out(path: Path, folder: Path) -> Path:
    """Leave a link where `path` was, to where it is now."""
    folder.mkdir(exist_ok=True)
    path.symlink_to(shutil.move(path, folder / path.name))
    return path


@pytest.mark.parametrize(
    "name", [*COPIED, *OWN, "experts", "special_tokens_map.json", "additional_chat_templates/a.jinja"]
)
def test_a_link_out_of_a_store_is_refused_unless_links_are_followed(store: Path, tmp_path: Path, name: str) -> None:
    if not (store / name).exists():
        (store / name).parent.mkdir(exist_ok=True)
        (store / name).write_text("{}")
    move_out(store / name, tmp_path / "elsewhere")
    for look in (mlx_ttd.load, mlx_ttd.info, mlx_ttd.verify, open_store, plan):
        with pytest.raises(StoreError, match=rf"{name}.* leads outside the store by a link, to .*follow_links=True"):
            look(store)
    assert open_store(store, follow_links=True).follow_links
    assert verify(store, follow_links=True).records == mlx_ttd.verify("demo").records
    assert info(store, follow_links=True) == info(store.parent / "store", True)


def test_experts_on_another_disk_run_where_links_are_followed(store: Path, tmp_path: Path, monkeypatch) -> None:
    move_out(store / "experts", tmp_path / "disk")
    wanted = mlx_ttd.info("demo")["least_bytes"]
    assert mlx_ttd.info(store, follow_links=True)["least_bytes"] == wanted
    assert mlx_ttd.verify(store, follow_links=True).records
    with mlx_ttd.load("demo", "150MB") as demo, mlx_ttd.load(store, "150MB", follow_links=True) as llm:
        assert llm.generate("In the", max_tokens=3).digest == demo.generate("In the", max_tokens=3).digest
    assert CliRunner().invoke(app, ["verify", str(store)]).exit_code == 1
    for command in ("verify", "info"):
        assert CliRunner().invoke(app, [command, str(store), "--follow-links"]).exit_code == 0
    monkeypatch.setenv("MLX_TTD_FOLLOW_LINKS", "1")
    assert mlx_ttd.info(store)["least_bytes"] == wanted
    assert mlx_ttd.verify(store).records
    assert plan(store).fits


def test_links_within_a_store_and_on_the_way_to_it_are_fine(store: Path, tmp_path: Path) -> None:
    move_out(store / "tokenizer.json", store / "kept")
    move_out(store / "experts", store / "kept")
    (tmp_path / "link").symlink_to(store)
    for path in (store, tmp_path / "link"):
        assert verify(path).records
        assert open_store(path).path == path


def test_links_in_a_circle_or_to_nothing_are_refused(store: Path) -> None:
    for target, words in (("tokenizer.json", "symbolic links"), ("nothing", "a link to a file that does not exist")):
        (store / "tokenizer.json").unlink()
        (store / "tokenizer.json").symlink_to(target)
        with pytest.raises(StoreError, match=words):
            open_store(store)
        with pytest.raises(TokenizerError, match=rf"tokenizer\.json .*({words})"):
            Tokenizer(store).encode("a")


def read_all(folder: Path) -> None:
    """Read what a directory says about text."""
    read_generation_defaults(folder)
    Tokenizer(folder).encode_chat([{"role": "user", "content": "a"}])


def fifo(path: Path) -> None:
    os.mkfifo(path)


def listener(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


PLACES: dict[str, Callable[[Path], None]] = {
    "FIFO": fifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "socket": listener,
    "directory": Path.mkdir,
}


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("name", [*COPIED, *OWN])
def test_what_is_no_file_is_refused_at_once_in_a_store(store: Path, name: str, kind: str) -> None:
    (store / name).unlink()
    PLACES[kind](store / name)
    began = time.monotonic()
    for look in (open_store, verify):
        with pytest.raises((StoreError, ConfigError), match=rf"{name}.* is a {kind} where a file is needed"):
            look(store, follow_links=True)
    with pytest.raises((StoreError, ConfigError)):
        mlx_ttd.load(store)
    assert time.monotonic() - began < 2


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("name", [*COPIED[:4], "model.safetensors", "model.safetensors.index.json"])
def test_what_is_no_file_is_refused_at_once_in_a_checkpoint(checkpoint: Path, name: str, kind: str) -> None:
    (checkpoint / name).unlink(missing_ok=True)
    PLACES[kind](checkpoint / name)
    # A device stands there by a link, which a checkpoint's may not be.
    told = "outside the checkpoint" if kind == "device" else f"is a {kind} where a file is needed"
    with pytest.raises(TTDError, match=rf"{name}.* {told}"):
        convert(checkpoint, checkpoint.parent / "made")


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("name", COPIED[1:])
def test_what_is_no_file_is_refused_at_once_by_each_reader(tmp_path: Path, name: str, kind: str) -> None:
    write_byte_tokenizer(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    PLACES[kind](tmp_path / name)
    with pytest.raises(TTDError, match=rf"{name}.* is a {kind} where a file is needed"):
        read_all(tmp_path)


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("name", ["trace.json", "trace.safetensors"])
def test_what_is_no_file_is_refused_at_once_in_a_trace(tmp_path: Path, name: str, kind: str) -> None:
    PLACES[kind](tmp_path / name)
    with pytest.raises(StoreError, match=f"is a {kind} where a file is needed|does not exist"):
        load_trace(tmp_path)
    with pytest.raises(StoreError, match=r"holds a trace already|cannot be written"):
        Trace("", "", (1,), 1, {"embedding": np.ones((1, 2), np.float32)}).save(tmp_path)


@pytest.mark.parametrize("name", [*COPIED, *OWN])
def test_a_git_lfs_pointer_in_a_store_is_called_one(store: Path, name: str) -> None:
    (store / name).write_bytes(POINTER)
    with pytest.raises(TTDError, match=rf"{name} is a Git LFS pointer.*git lfs pull"):
        open_store(store), read_all(store)


@pytest.mark.parametrize("name", [*COPIED[:4], "model.safetensors", "model.safetensors.index.json"])
def test_a_git_lfs_pointer_in_a_checkpoint_is_called_one(checkpoint: Path, name: str) -> None:
    (checkpoint / name).write_bytes(POINTER)
    with pytest.raises(TTDError, match=rf"{name} is a Git LFS pointer.*git lfs pull"):
        convert(checkpoint, checkpoint.parent / "made")
    if name in COPIED[1:4]:
        with pytest.raises(TTDError, match=rf"{name} is a Git LFS pointer.*git lfs pull"):
            read_all(checkpoint)


TAKERS: dict[str, Callable[[str], object]] = {
    "load": mlx_ttd.load,
    "info": mlx_ttd.info,
    "verify": mlx_ttd.verify,
    "plan": plan,
    "open_store": open_store,
    "checkpoint": open_checkpoint,
    "source": lambda path: convert(path, "made"),
    "destination": lambda path: convert(tiny(Path("source")), path),
    "policy": load_policy,
    "trace": lambda path: mlx_ttd.trace("demo", "a", path),
    "diff": load_trace,
    "stores": lambda path: mlx_ttd.load("nobody/nothing", stores=path),
    "tokenizer": Tokenizer,
    "generation": read_generation_defaults,
}


@pytest.mark.parametrize("taker", TAKERS)
@pytest.mark.parametrize(("name", "words"), [("a\0b", "NUL"), ("a\ud800b", "lone surrogate")])
def test_a_path_that_no_system_has_is_refused(taker: str, name: str, words: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match=words):
        TAKERS[taker](name)


def test_home_is_expanded_wherever_a_path_is_taken(store: Path, checkpoint: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    with mlx_ttd.load("~/store", "150MB") as llm:
        assert llm.store.path == store
    assert open_store("~/store").path == store
    assert mlx_ttd.info(Path("~/store"))["path"] == str(store)
    assert mlx_ttd.verify("~/store").digest == mlx_ttd.verify("demo").digest
    assert plan("~/store").fits
    assert plan("~/checkpoint").fits
    (tmp_path / "policy.json").write_text(json.dumps({"roles": {"head": "stored"}}))
    assert load_policy("~/policy.json").roles == {"head": None}
    assert convert("~/checkpoint", "~/made.ttd") == tmp_path / "made.ttd"
    mlx_ttd.trace("~/store", "a", "~/trace", memory="150MB")
    assert load_trace("~/trace").tokens
    assert Tokenizer("~/store").encode("a")
    assert read_generation_defaults("~/store") == read_generation_defaults(store)
    shutil.move(store, tmp_path / "stores" / "a" / "b.ttd")
    assert mlx_ttd.info("a/b", stores="~/stores")["path"] == str(tmp_path / "stores/a/b.ttd")
    made = CliRunner().invoke(app, ["convert", "~/checkpoint", "~/again.ttd"])
    assert (made.exit_code, (tmp_path / "again.ttd" / "manifest.json").is_file()) == (0, True)
    assert not list((tmp_path / "work").iterdir())
