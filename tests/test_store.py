"""A store is untrusted: whatever is wrong with a directory is one StoreError before any weight is allocated."""

from __future__ import annotations

import json
import os
import shutil
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import MOE, TEXT, tiny, values, write_safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from mlx_ttd.cli import app
from mlx_ttd.errors import ConfigError, RecordError, StoreError
from mlx_ttd.spec import model_spec
from mlx_ttd.store import convert, info, open_store, read_tensor
from mlx_ttd.store.safetensors_file import TensorInfo, make_header, read_header


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole store; tests change copies of it."""
    root = tmp_path_factory.mktemp("made")
    return convert(tiny(root / "src", mtp=True), root / "store")


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "store"))


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    """Rewrite a JSON file; `change` edits it in place."""
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def poke(path: Path, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


EXAMPLE = TEXT | {"num_hidden_layers": 2, "full_attention_interval": 2, "num_experts": 2, "num_experts_per_tok": 1}


def test_the_example_manifest_is_of_this_format(tmp_path: Path) -> None:
    from mlx_ttd.store.manifest_check import parse_manifest

    path = resources.files("mlx_ttd.store") / "example_manifest.json"
    text = path.read_text()
    assert parse_manifest(json.loads(text), model_spec(EXAMPLE), "example").to_text() == text
    made = json.loads(
        (convert(tiny(tmp_path / "src", EXAMPLE, mtp=True), tmp_path / "dst") / "manifest.json").read_text()
    )
    example = json.loads(text)
    assert made.keys() == example.keys()
    assert all(made[key] == example[key] for key in ("format", "version", "norms", "quantisation", "layouts", "mtp"))
    assert {k: v["bytes"] for k, v in made["files"].items()} == {k: v["bytes"] for k, v in example["files"].items()}


def test_an_opened_store(made: Path) -> None:
    store = open_store(made)
    assert store.spec == model_spec(MOE)
    assert store.config == MOE
    path, offset, experts = store.expert_file(3)
    assert (path.name, offset, experts) == ("layer-003.safetensors", 16_384, 8)
    assert path.stat().st_size == offset + experts * store.layouts[3].stride
    assert store.layouts[3].stride % 16_384 == 0
    assert store.quantisation("layers.0.gdn.in_qkv").bits == 4
    assert store.quantisation("layers.0.gdn.in_a") is None
    assert store.mtp.expert_file(0)[0].name == "mtp-000.safetensors"
    assert open_store(made).digest == store.digest


def test_an_embedding_row_is_one_range(made: Path) -> None:
    store = open_store(made)
    row = store.embedding["embedding"]
    width = row.nbytes // row.shape[0]
    raw = np.fromfile(row.path, np.uint16, width // 2, offset=row.offset + 17 * width)
    np.testing.assert_array_equal(raw, values(store.spec)["embedding"][1][17])


@pytest.mark.slow
def test_a_tensor_of_more_than_two_gib_is_read(tmp_path: Path) -> None:
    rows, path = 1_100_000, tmp_path / "sparse"
    with open(path, "wb") as file:
        file.truncate(2000 * rows - 2)
        file.seek(0, os.SEEK_END)
        file.write(b"\x80\x3f")
    array = read_tensor(TensorInfo("head", "BF16", (rows, 1000), path, 0, 2000 * rows))
    assert array.shape == (rows, 1000)
    assert [array[0, 0].item(), array[-1, -1].item()] == [0.0, 1.0]


def test_read_tensor_needs_no_second_copy(made: Path, nothing_left_by_others: None) -> None:
    tensor = open_store(made).resident["head"]
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    array = read_tensor(tensor)
    assert mx.get_active_memory() - before <= array.nbytes + 4096
    assert mx.get_peak_memory() - before < 2 * array.nbytes


def test_a_short_read_names_file_and_tensor(store: Path) -> None:
    tensor = open_store(store).resident["head"]
    os.truncate(tensor.path, tensor.offset + 100)
    with pytest.raises(StoreError, match=r"resident\.safetensors ends inside tensor 'head'"):
        read_tensor(tensor)


def test_the_command_prints_yes_and_no(made: Path) -> None:
    lines = CliRunner().invoke(app, ["info", str(made)]).stdout.splitlines()
    assert {"tied_head: no", "mtp: yes"} <= set(lines)


def test_info_adds_up(made: Path) -> None:
    facts = info(made)
    files = {p.relative_to(made).as_posix(): p.stat().st_size for p in made.rglob("*.safetensors")}
    assert facts["total_bytes"] == sum(files.values()) == sum(facts["parts"].values())
    assert facts["parts"]["resident"] == files["resident.safetensors"]
    assert facts["resident_bytes"] == sum(facts["resident_bytes_by_role"].values())
    assert facts["bytes_per_token"] == 2 * sum(facts["record_strides"])
    assert facts["precision"]["experts"] == ["affine 4-bit group 64"]
    assert facts["digest"] == open_store(made).digest
    json.dumps(facts)


def test_what_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="does not exist"):
        open_store(tmp_path / "nothing")
    with pytest.raises(StoreError, match=r"has no manifest\.json"):
        open_store(tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(StoreError, match="not the manifest of an mlx_ttd store"):
        open_store(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(StoreError, match="cannot be read as JSON"):
        open_store(tmp_path)


def test_a_newer_version_says_upgrade(store: Path) -> None:
    edit(store / "manifest.json", lambda m: m.update(version=2, layouts="new"))
    with pytest.raises(StoreError, match="format version 2; this library reads up to 1: upgrade"):
        open_store(store)


@pytest.mark.parametrize(
    "name", ["experts/layer-001.safetensors", "resident.safetensors", "experts/mtp-000.safetensors"]
)
def test_a_missing_or_cut_file_is_named(store: Path, name: str) -> None:
    size = (store / name).stat().st_size
    os.truncate(store / name, size - 1)
    with pytest.raises(StoreError, match=f"{name}.*(cut short|whole)"):
        open_store(store)
    (store / name).unlink()
    with pytest.raises(StoreError, match=f"{name} is missing"):
        open_store(store)


def test_an_expert_count_that_disagrees(store: Path) -> None:
    edit(store / "config.json", lambda c: c["text_config"].update(num_experts=16))
    with pytest.raises(RecordError, match=r"layer-000.* holds 8 experts where config\.json says num_experts 16"):
        open_store(store)


def test_an_edited_config_is_noticed(store: Path) -> None:
    edit(store / "config.json", lambda c: c["text_config"].update(rms_norm_eps=1e-5))
    with pytest.raises(StoreError, match=r"config\.json does not match its digest"):
        open_store(store)


def test_an_unknown_model_type(store: Path) -> None:
    edit(store / "config.json", lambda c: c["text_config"].update(model_type="gpt2"))
    with pytest.raises(ConfigError, match="'gpt2' is not supported"):
        open_store(store)


@pytest.mark.skipif(os.name != "posix", reason="needs Linux")
def test_names_cannot_leave_the_directory(store: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere.safetensors"
    shutil.move(store / "resident.safetensors", moved)
    (store / "resident.safetensors").symlink_to(moved)
    with pytest.raises(StoreError, match="leads outside the store"):
        open_store(store)
    edit(
        store / "manifest.json",
        lambda m: m["files"].update({"../elsewhere.safetensors": m["files"]["resident.safetensors"]}),
    )
    with pytest.raises(StoreError, match=r"files lists \['\.\./elsewhere\.safetensors'\]"):
        open_store(store)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "layouts is no object": lambda m: m.update(layouts=[]),
    "disagrees with hidden 128": lambda m: m["layouts"]["distinct"][0].update(stride=1 << 40),
    "affine codes have": lambda m: m["layouts"]["distinct"][0]["gate_up"].update(bits=7),
    "do not divide into groups": lambda m: m["layouts"]["distinct"][0]["down"].update(group=128),
    "layout is 9": lambda m: m["layouts"]["trunk"].__setitem__(0, 9),
    "layout is None": lambda m: m["layouts"]["trunk"].__setitem__(0, None),
    "has 3 of 4 layers": lambda m: m["layouts"]["trunk"].pop(),
    "no matrix of this model": lambda m: m["quantisation"].update(norm={"bits": 4, "group": 64}),
    "lacks bits or group": lambda m: m["quantisation"].update(head={"bits": "4", "group": 64}),
    "norms is 'x'": lambda m: m.update(norms="x"),
    "mtp is neither": lambda m: m.update(mtp=1),
    "lacks ['embedding.safetensors']": lambda m: m["files"].pop("embedding.safetensors"),
    "is no size": lambda m: m["files"]["resident.safetensors"].update(bytes=-1),
    "is no SHA-256": lambda m: m["files"]["resident.safetensors"].update(digest="00"),
    "either tensors or records": lambda m: m["files"]["resident.safetensors"].update(records=[]),
    "copied names a file": lambda m: m["copied"].update({"../x": {"bytes": 1, "sha256": "0" * 64}}),
    "digests of its parts": lambda m: m["files"]["experts/layer-000.safetensors"]["records"].__setitem__(2, "0" * 64),
    "header does not match": lambda m: m["files"]["resident.safetensors"].update(header="0" * 64),
    "holds 8 experts": lambda m: m["files"]["experts/layer-000.safetensors"]["records"].pop(),
    "same tensors": lambda m: m["files"]["resident.safetensors"]["tensors"].pop("norm"),
    "'head' is BF16 [192, 128] where": lambda m: m["quantisation"].update(
        head={"bits": 4, "group": 64, "mode": "affine", "scale_dtype": "bfloat16"}
    ),
}


@pytest.mark.parametrize("words", CHANGES)
def test_a_manifest_that_lies(store: Path, words: str) -> None:
    edit(store / "manifest.json", CHANGES[words])
    with pytest.raises(StoreError) as error:
        open_store(store)
    assert words in str(error.value)


@given(data=st.data())
@settings(max_examples=60)
def test_any_damage_to_a_manifest_is_an_error_or_harmless(made: Path, data: st.DataObject) -> None:
    from mlx_ttd.store.manifest_check import check_version, parse_manifest

    manifest = json.loads((made / "manifest.json").read_text())
    node: Any = manifest
    while isinstance(node, dict | list) and node:
        keys = sorted(node) if isinstance(node, dict) else range(len(node))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(node[key], dict | list) or not node[key] or data.draw(st.booleans()):
            node[key] = data.draw(st.sampled_from([None, True, -1, 1 << 70, 1.5, "", "../x", [], {}, [None], {"a": 1}]))
            break
        node = node[key]
    with suppress(StoreError):
        check_version(manifest, "m")
        parse_manifest(manifest, model_spec(MOE), "m")


def header_file(path: Path, header: Any, data: int = 64) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data))
    return path


def entry(begin: int = 0, end: int = 8, dtype: Any = "F32", shape: Any = (2,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"a": entry(0, 72, shape=(18,))}, "claims 72 bytes of data where the file holds 64"),
        ({"a": entry(0, 1 << 50, shape=(1 << 48,))}, "claims 1,125,899,906,842,624 bytes"),
        ({"a": entry(0, 8, shape=(3,))}, "does not fill"),
        ({"a": entry(8, 0)}, "malformed data_offsets"),
        ({"a": entry(-8, 0)}, "malformed data_offsets"),
        ({"a": entry(0, True)}, "malformed data_offsets"),
        ({"a": entry(), "b": entry(4, 12)}, "overlaps"),
        ({"a": entry(dtype="F4")}, "dtype 'F4'"),
        ({"a": entry(dtype=[])}, r"dtype \[\]"),
        ({"a": entry(shape=[-1])}, "malformed shape"),
        ({"a": entry(shape=None)}, "malformed shape"),
        ({"a": []}, "lacks a dtype"),
        ([], "not an object"),
        (b"{", "no valid safetensors header"),
        (b'{"a":1,"a":2}', "a name occurs twice"),
        (b"[" * 100_000, "no valid safetensors header"),
    ],
)
def test_a_header_that_lies(tmp_path: Path, header: Any, words: str) -> None:
    with pytest.raises(StoreError, match=words):
        read_header(header_file(tmp_path / "x.safetensors", header))


def test_a_header_longer_than_its_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for raw in (b"", b"\0\0\0", (1 << 60).to_bytes(8, "little"), (100).to_bytes(8, "little") + b"{}"):
        path.write_bytes(raw)
        with pytest.raises(StoreError, match="cut short"):
            read_header(path)


def test_the_largest_header_in_use_is_read_in_bounds(tmp_path: Path) -> None:
    """Every expert of a 35B apart in block FP8, all in one file: 62 thousand tensors, 10 MB."""
    layer = "model.language_model.layers.39.mlp.experts"
    shapes = {"weight": ("F8_E4M3", (0, 2048)), "weight_scale_inv": ("F32", (0, 16))}
    names = (f"{layer}.{i}.down_proj.{part}" for i in range(31_000) for part in shapes)
    header = make_header(tmp_path / "x", {name: shapes[name.rpartition(".")[2]] for name in names})
    (tmp_path / "x").write_bytes(header.raw)
    tracemalloc.start()
    began = time.process_time()
    assert len(read_header(tmp_path / "x").tensors) == 62_000
    seconds, (_, peak) = time.process_time() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < 15
    assert peak < 12 * len(header.raw)


@pytest.mark.parametrize("flood", [b"[],", b"0,", b'{"":0},', b'"ab",', b" ", b'{"":'])
def test_a_header_of_hundreds_of_megabytes_is_refused_in_bounds(tmp_path: Path, flood: bytes) -> None:
    """What is claimed, and what is there as far as it would be read."""
    path = tmp_path / "x.safetensors"
    for length, words in ((300 << 20, "over the 33,554,432 that are read"), (32 << 20, "no valid safetensors header")):
        text = (b"[" + flood * (length // len(flood)))[:length] if length <= 32 << 20 else b""
        path.write_bytes(length.to_bytes(8, "little") + text)
        os.truncate(path, 8 + length)
        tracemalloc.start()
        began = time.process_time()
        with pytest.raises(StoreError, match=words):
            read_header(path)
        seconds, (_, peak) = time.process_time() - began, tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert seconds < 2
        assert peak < 100 << 20


def test_a_file_of_json_without_end_is_refused_in_bounds(tmp_path: Path) -> None:
    from mlx_ttd.spec import read_json

    for text in (b"[" + b"[]," * 600_000, b'{"a":[' + b"0," * 1_100_000 + b"0]}"):
        (tmp_path / "x.json").write_bytes(text)
        tracemalloc.start()
        with pytest.raises(ConfigError, match="more than 1,048,576 values"):
            read_json(tmp_path / "x.json")
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
        tracemalloc.stop()
    (tmp_path / "x.json").write_bytes(b" " * (5 << 20))
    with pytest.raises(ConfigError, match="is larger than 4,194,304 bytes"):
        read_json(tmp_path / "x.json")


@given(st.binary(max_size=200))
@settings(max_examples=200)
def test_no_bytes_break_the_header_reader(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.safetensors"
    for blob in (raw, len(raw).to_bytes(8, "little") + raw):
        path.write_bytes(blob)
        with suppress(StoreError):
            assert read_header(path).file_bytes == len(blob)


def test_headers_written_are_headers_read(tmp_path: Path) -> None:
    tensors = {"a": ("F32", (2, 3)), "b.scales": ("BF16", (5,)), "records": ("U8", (4, 16))}
    for start in (None, 16_384):
        header = make_header(tmp_path / "x.safetensors", tensors, start)
        header.path.write_bytes(header.raw + bytes(header.file_bytes - len(header.raw)))
        assert read_header(header.path) == header
        assert len(header.raw) == (start or len(header.raw))
        assert len(header.raw) % 64 == 0
    assert mx.load(str(header.path))["a"].shape == (2, 3)
    write_safetensors(tmp_path / "y.safetensors", {"a": ("F32", np.arange(6, dtype=np.float32).reshape(2, 3))})
    assert read_header(tmp_path / "y.safetensors").tensors["a"].shape == (2, 3)


def test_a_flat_config_is_as_good_as_a_nested_one(tmp_path: Path) -> None:
    store = open_store(convert(tiny(tmp_path / "src", TEXT), tmp_path / "dst"))
    assert store.spec == model_spec(MOE)
