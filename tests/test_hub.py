"""Conversion from a hub, played by a local server: pinned, checked, shard by shard, equal to a directory's."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import MOE, hf_tensors, values, write

from mlx_ttd.errors import CheckpointError, ConversionError, OptionError
from mlx_ttd.spec import model_spec
from mlx_ttd.store import convert, open_store, verify
from mlx_ttd.store.journal import Journal

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "some-lab/tiny-moe"
VISION = "model-00004-of-00004.safetensors"


class Hub:
    """What the server serves, and what it was asked for: whole files by name, and bytes of ranges."""

    def __init__(self, folder: Path):
        self.files = {p.name: p.read_bytes() for p in folder.iterdir()}
        self.damaged: set[str] = set()
        self.whole: Counter[str] = Counter()
        self.ranged: Counter[str] = Counter()

    def info(self) -> dict[str, Any]:
        def sibling(name: str, data: bytes) -> dict[str, Any]:
            found = {
                "rfilename": name,
                "size": len(data),
                "blobId": hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest(),
            }
            if name.endswith(".safetensors"):
                found["lfs"] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "pointerSize": 134}
            return found

        return {"id": REPO, "sha": COMMIT, "siblings": [sibling(*item) for item in self.files.items()]}


def handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for key, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def do_GET(self) -> None:
            path = self.path.split("?")[0]
            if path in (
                f"/api/models/{REPO}",
                f"/api/models/{REPO}/revision/main",
                f"/api/models/{REPO}/revision/{COMMIT}",
            ):
                return self.answer(200, json.dumps(hub.info()).encode(), {"Content-Type": "application/json"})
            name = path.removeprefix(f"/{REPO}/resolve/{COMMIT}/")
            if not path.startswith(f"/{REPO}/resolve/{COMMIT}/") or name not in hub.files:
                return self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})
            data = hub.files[name]
            headers = {
                "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
                "X-Repo-Commit": COMMIT,
                "Accept-Ranges": "bytes",
            }
            if self.command == "GET" and "Range" in self.headers:
                first, last = self.headers["Range"].removeprefix("bytes=").split("-")
                part = data[int(first) : int(last) + 1 if last else None]
                hub.ranged[name] += len(part)
                headers["Content-Range"] = f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}"
                return self.answer(206, part, headers)
            if self.command == "GET":
                hub.whole[name] += 1
                if name in hub.damaged:
                    data = data[:-1] + bytes([data[-1] ^ 1])
            return self.answer(200, data, headers)

        do_HEAD = do_GET

    return Handler


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    from huggingface_hub import constants

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
    served = Hub(source)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(served))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    yield served
    server.shutdown()
    server.server_close()


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
    with pytest.raises(CheckpointError, match="some-lab/other could not be read from the hub: RepositoryNotFoundError"):
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
