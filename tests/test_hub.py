"""Conversion from a hub, played by a local server: pinned, checked, shard by shard, equal to a directory's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import MOE, hf_tensors, values, write
from hub_server import COMMIT, REPO, Hub, point_to, serving

from mlx_ttd.errors import CheckpointError, ConversionError, OptionError
from mlx_ttd.spec import model_spec
from mlx_ttd.store import convert, open_store, verify
from mlx_ttd.store.journal import Journal

VISION = "model-00004-of-00004.safetensors"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    spec = model_spec(MOE)
    tensors = hf_tensors(spec, values(spec, mtp=True))
    ordered = dict(sorted(tensors.items(), key=lambda item: "layers.3" in item[0] or "lm_head" in item[0]))
    source = write(tmp_path / "source", MOE, ordered, extra={"tokenizer.json": "{}", "README.md": "not needed"})
    by_shard: list[dict[str, Any]] = [
        {},
        {},
        {},
        {"model.visual.patch.weight": ("BF16", np.zeros((64, 64), np.uint16))},
    ]
    total, seen = sum(a.nbytes for _, a in ordered.values()), 0
    for name, stored in ordered.items():
        by_shard[min(2, 3 * seen // total)][name] = stored
        seen += stored[1].nbytes
    (source / "model.safetensors").unlink()
    write_shards(source, by_shard)
    served = Hub({p.name: p.read_bytes() for p in source.iterdir()})
    with serving(served) as endpoint:
        point_to(endpoint, monkeypatch)
        yield served


def write_shards(source: Path, by_shard: list[dict[str, Any]]) -> None:
    from checkpoints import write_safetensors

    index = {}
    for i, tensors in enumerate(by_shard, 1):
        file = f"model-{i:05d}-of-{len(by_shard):05d}.safetensors"
        write_safetensors(source / file, tensors)
        index |= dict.fromkeys(tensors, file)
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def contents(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_a_hub_id_gives_the_store_of_its_directory(hub: Hub, tmp_path: Path) -> None:
    seen = []
    store = open_store(convert(REPO, tmp_path / "hub.ttd", progress=seen.append))
    local = contents(convert(tmp_path / "source", tmp_path / "local.ttd"))
    found = contents(store.path)
    assert {n: d for n, d in found.items() if n != "manifest.json"} == {
        n: d for n, d in local.items() if n != "manifest.json"
    }
    assert (store.manifest.source["repo"], store.manifest.source["revision"]) == (REPO, COMMIT)
    verify(store.path)
    shards = {n: c for n, c in hub.whole.items() if n.endswith(".safetensors")}
    assert shards == {f"model-0000{i}-of-00004.safetensors": 1 for i in (1, 2, 3)}
    assert hub.ranged[VISION] < 10_000
    assert "README.md" not in hub.whole
    assert not (tmp_path / "hub.ttd.partial").exists()
    downloaded = sum(len(hub.files[name]) for name in shards)
    assert seen[-1].total == sum(e.bytes for e in store.manifest.files.values()) + downloaded


def test_named_templates_are_fetched(hub: Hub, tmp_path: Path) -> None:
    hub.files["additional_chat_templates/tool_use.jinja"] = b"tools"
    hub.files["other/tool_use.jinja"] = b"not needed"
    store = convert(REPO, tmp_path / "dst.ttd")
    assert (store / "additional_chat_templates/tool_use.jinja").read_bytes() == b"tools"
    assert not (store / "other").exists()


def test_norms_are_told_before_any_shard_is_fetched(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_ttd.store.norms._shown", lambda values: None)
    with pytest.raises(CheckpointError, match="say norms="):
        convert(REPO, tmp_path / "dst.ttd")
    assert not [name for name in hub.whole if name.endswith(".safetensors")]


def test_shards_do_not_pile_up(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 0
    record = Journal.record

    def noting(self: Journal, *arguments: Any) -> None:
        nonlocal most
        present = [p for p in self.source.rglob("*.safetensors") if p.is_file()]
        most = max(most, len(present))
        record(self, *arguments)

    monkeypatch.setattr(Journal, "record", noting)
    convert(REPO, tmp_path / "dst")
    assert most == 2


def fill_disk_after(patch: pytest.MonkeyPatch, file: str) -> None:
    record = Journal.record

    def stopping(self: Journal, name: str, *arguments: Any) -> None:
        record(self, name, *arguments)
        if name == file:
            raise OSError(28, "No space left on device")

    patch.setattr(Journal, "record", stopping)


def test_a_stopped_conversion_fetches_nothing_twice_that_it_kept(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fill_disk_after(patch, "experts/layer-002.safetensors")
        with pytest.raises(ConversionError, match=r"No space left on device\. Calling again resumes"):
            convert(REPO, tmp_path / "dst")
    convert(REPO, tmp_path / "dst")
    assert hub.whole["model-00001-of-00004.safetensors"] == 1
    whole = convert(REPO, tmp_path / "whole")
    assert contents(tmp_path / "dst") == contents(whole)


def test_another_policy_after_a_stop_gives_the_store_of_a_first_run(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fill_disk_after(patch, "resident.safetensors")
        with pytest.raises(ConversionError):
            convert(REPO, tmp_path / "dst")
    assert list((tmp_path / "dst.partial").rglob("*.kept"))
    found = contents(convert(REPO, tmp_path / "dst", "int8"))
    whole = contents(convert(tmp_path / "source", tmp_path / "whole", "int8"))
    assert [name for name in whole if found[name] != whole[name]] == ["manifest.json"]


def test_a_damaged_shard_is_refused(hub: Hub, tmp_path: Path) -> None:
    name = "model-00002-of-00004.safetensors"
    hub.damaged.add(name)
    with pytest.raises(CheckpointError, match=f"{name} of {REPO} arrived twice with another digest"):
        convert(REPO, tmp_path / "dst")
    assert hub.whole[name] == 2
    assert not (tmp_path / "dst").exists()
    hub.damaged.clear()
    convert(REPO, tmp_path / "dst")


def test_what_the_hub_lacks_is_said_in_a_sentence(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="other could not be read from the hub: there is none of that name"):
        convert("some-lab/other", tmp_path / "dst")
    with pytest.raises(OptionError, match="is of use with a hub id alone"):
        convert(tmp_path / "source", tmp_path / "dst", revision="main")
    del hub.files["model-00002-of-00004.safetensors"]
    with pytest.raises(CheckpointError, match=r"lacks 1 of 4 shards \(model-00002"):
        convert(REPO, tmp_path / "dst")
    del hub.files["config.json"]
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        convert(REPO, tmp_path / "dst")
    assert not (tmp_path / "dst").exists()


def test_a_mismatch_is_found_before_any_shard_is_fetched(hub: Hub, tmp_path: Path) -> None:
    config = json.loads(hub.files["config.json"])
    config["text_config"]["num_experts"] = 9
    hub.files["config.json"] = json.dumps(config).encode()
    with pytest.raises(CheckpointError, match=r"where \[9, 128, 128\] is needed"):
        convert(REPO, tmp_path / "dst")
    assert not [name for name in hub.whole if name.endswith(".safetensors")]
