"""verify reads every byte, and names what is damaged by file, layer and expert."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from checkpoints import DENSE, DENSE_TEXT, MOE, TEXT, hf_tensors, tiny, values, write
from hypothesis import given, settings
from hypothesis import strategies as st
from test_store import edit, poke

from mlx_ttd.errors import OptionError, RecordError, StoreError
from mlx_ttd.spec import model_spec
from mlx_ttd.store import convert, open_store, policies, verify


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
    assert report.policy == manifest.policy == "int4"
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
    where = f"layer 2, expert 5, {stride:,} bytes at {start + 5 * stride:,}"
    with pytest.raises(RecordError, match=rf"layer-002\.safetensors: {where}, does not match its digest") as error:
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
    with pytest.raises(
        StoreError, match=rf"{name}: {words}, [\d,]+ bytes at [\d,]+, does not match its digest"
    ) as error:
        verify(store)
    assert not isinstance(error.value, RecordError)


def test_bytes_behind_a_copied_file_are_damage(store: Path) -> None:
    path = store / "tokenizer.json"
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(StoreError, match=r"tokenizer\.json: the file, 3 bytes at 0, does not match its digest"):
        verify(store)


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


def test_bytes_that_no_digest_covers_are_refused(store: Path) -> None:
    path = store / "resident.safetensors"
    path.write_bytes(path.read_bytes() + bytes(64))
    edit(store / "manifest.json", lambda m: m["files"][path.name].update(bytes=path.stat().st_size))
    with pytest.raises(StoreError, match=r"resident\.safetensors .* bytes that belong to no tensor"):
        verify(store)


@pytest.mark.parametrize("name", ["resident.safetensors", "experts/layer-001.safetensors"])
def test_data_off_the_alignment_is_refused(store: Path, name: str) -> None:
    raw = (store / name).read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    moved = start.to_bytes(8, "little") + raw[8:start] + b" " * 8 + raw[start:]
    (store / name).write_bytes(moved)
    edit(store / "manifest.json", lambda m: m["files"][name].update(bytes=len(moved)))
    with pytest.raises(StoreError, match=r"no multiple of 64|no expert file"):
        verify(store)


ROLES = json.loads((Path(convert.__code__.co_filename).parent / "policies" / "int4.json").read_text())["roles"]
PRECISIONS = ["stored", {"mode": "mxfp4"}, *({"bits": b, "group": g} for b in (2, 3, 4, 5, 6, 8) for g in (32, 64))]


@st.composite
def checkpoints(draw: st.DrawFn) -> tuple[dict, bool, str]:
    """(config, whether there is an MTP layer, dtype of the weights) of a model of a few kilobytes."""
    text = dict(draw(st.sampled_from([TEXT, DENSE_TEXT])))
    text |= {"hidden_size": draw(st.sampled_from([64, 128])), "tie_word_embeddings": draw(st.booleans())}
    text |= {"num_hidden_layers": draw(st.integers(1, 3)), "vocab_size": draw(st.integers(2, 70))}
    text["full_attention_interval"] = draw(st.integers(1, 3))
    if "num_experts" in text:
        text |= {"num_experts": draw(st.integers(1, 5)), "num_experts_per_tok": 1}
        text["moe_intermediate_size"] = draw(st.sampled_from([64, 192]))
    return text, draw(st.booleans()), draw(st.sampled_from(["BF16", "F16", "F32"]))


@settings(max_examples=8)
@given(checkpoint=checkpoints(), policy=st.sampled_from([*policies(), "drawn"]), data=st.data())
def test_whatever_is_written_verifies(tmp_path_factory, checkpoint, policy, data) -> None:
    folder = tmp_path_factory.mktemp("written")
    if policy == "drawn":
        packed = [role for role, precision in ROLES.items() if precision != "stored"]
        drawn = {role: data.draw(st.sampled_from(PRECISIONS[1 if "moe" in role else 0 :]), role) for role in packed}
        policy = folder / "drawn.json"
        policy.write_text(json.dumps({"roles": ROLES | drawn}))
    config, mtp, dtype = checkpoint
    store = convert(tiny(folder / "src", config, 0, mtp, dtype), folder / "store", policy)
    report = verify(store)
    files = [path for path in store.rglob("*") if path.is_file() and path.name != "manifest.json"]
    starts = [8 + int.from_bytes(path.read_bytes()[:8], "little") for path in store.rglob("*.safetensors")]
    assert report.files == len(files)
    assert report.bytes + sum(starts) == sum(path.stat().st_size for path in files)
    shutil.rmtree(folder)
