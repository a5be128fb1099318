"""A hub that lies, trickles, is busy or refuses is read with patience, in bounds, or refused in a sentence."""

from __future__ import annotations

import json
import signal
import threading
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import tiny
from hub_server import COMMIT, REPO, Fault, Hub, point_to, sending, serving, status

from mlx_ttd.errors import CheckpointError, ConversionError
from mlx_ttd.store import convert, hub_bytes
from mlx_ttd.store.hub import open_hub_checkpoint
from mlx_ttd.store.hub_listing import Listed, list_files
from mlx_ttd.store.hub_patience import LEAST_RATE, LONGEST_ASKED_WAIT, LONGEST_WAIT, TRIES, Passing, Patience, Tries
from mlx_ttd.store.hub_repo import PART, Repo
from mlx_ttd.store.hub_transfer import Remote, redirected

SIZE = 300_000
DATA = bytes(i * 7 % 251 for i in range(SIZE))
WAITS: list[float] = []
QUICK = Patience(tries=3, pause=WAITS.append)
SHORT = replace(QUICK, answer_s=1.0, window_s=0.5)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    served = Hub({"weights.safetensors": DATA, "config.json": b"{}"})
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    WAITS.clear()
    with serving(served) as endpoint:
        point_to(endpoint, monkeypatch)
        yield served


def read(start: int = 1000, stop: int | None = 200_000, patience: Patience = QUICK) -> bytes:
    return b"".join(Remote(REPO, COMMIT, patience).blocks("weights.safetensors", start, stop, SIZE))


def part(start: int, stop: int, total: object = SIZE) -> dict[str, str]:
    return {"Content_Range": f"bytes {start}-{stop - 1}/{total}"}


def endless() -> Iterator[bytes]:
    while True:
        yield bytes(1 << 16)


def test_a_range_and_a_whole_file_have_their_bytes(hub: Hub) -> None:
    assert read() == DATA[1000:200_000]
    assert read(0, None) == DATA
    assert read(5, 5) == b""
    assert [asked[1].get("Range") for asked in hub.asked] == ["bytes=1000-199999", None]
    assert not WAITS


def test_an_answer_that_does_not_end_is_left_after_the_bytes_asked_for(hub: Hub) -> None:
    hub.faults["weights.safetensors"] = [sending(206, endless, **part(1000, 200_000)), sending(200, endless)]
    tracemalloc.start()
    for start, stop in ((1000, 200_000), (0, None)):
        with pytest.raises(CheckpointError, match=r"sends more of weights.* than was asked"):
            read(start, stop)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


RANGES: dict[str, tuple[int, dict[str, str]]] = {
    "another start": (206, part(0, 199_000)),
    "a later end": (206, part(1000, 200_001)),
    "another size": (206, part(1000, 200_000, SIZE + 1)),
    "an end before its start": (206, part(1000, 900)),
    "no range": (206, {}),
    "several parts": (206, {"Content_Type": "multipart/byteranges; boundary=x"}),
    "a whole file": (200, {}),
    "negative numbers": (206, {"Content_Range": "bytes -1-199999/300000"}),
    "numbers without end": (206, {"Content_Range": f"bytes 1000-{'9' * 5000}/300000"}),
}


@pytest.mark.parametrize("kind", RANGES)
def test_another_range_than_was_asked_is_refused(hub: Hub, kind: str) -> None:
    code, headers = RANGES[kind]
    hub.faults["weights.safetensors"] = [sending(code, endless, **headers)]
    with pytest.raises(CheckpointError, match="does not serve ranges") as caught:
        read()
    assert len(str(caught.value)) < 400


def test_an_encoded_answer_and_one_of_another_length_are_refused(hub: Hub) -> None:
    headers = part(1000, 200_000)
    hub.faults["weights.safetensors"] = [sending(206, endless, Content_Encoding="gzip", **headers)]
    with pytest.raises(CheckpointError, match=r"encoded \('gzip'\), which was not asked"):
        read()
    assert hub.asked[0][1]["Accept-Encoding"] == "identity"
    hub.faults["weights.safetensors"] = [sending(206, endless, Content_Length="6000000000", **headers)]
    with pytest.raises(CheckpointError, match=r"answers 199,000 bytes of .* with 6000000000"):
        read()


def reset(to: Any) -> None:
    """Half of what was asked, and then a closed connection."""
    first, last = (int(n) for n in to.headers["Range"].removeprefix("bytes=").split("-"))
    half = (first + last) // 2
    length = {"Content_Length": str(last + 1 - first)}
    sending(206, lambda: iter([DATA[first:half]]), **part(first, last + 1), **length)(to)


def shorter(to: Any) -> None:
    """A right answer of half of the range."""
    first, last = (int(n) for n in to.headers["Range"].removeprefix("bytes=").split("-"))
    half = (first + last) // 2
    sending(206, lambda: iter([DATA[first:half]]), **part(first, half))(to)


def trickling(to: Any) -> None:
    """The right bytes, one by one."""
    first, last = (int(n) for n in to.headers["Range"].removeprefix("bytes=").split("-"))
    bytes_ = (time.sleep(0.02) or DATA[i : i + 1] for i in range(first, last + 1))
    sending(206, lambda: bytes_, **part(first, last + 1))(to)


def silent(to: Any) -> None:
    time.sleep(4)


def hang_up(to: Any) -> None:
    to.connection.close()


PASSING: dict[str, Fault] = {
    **{str(code): status(code) for code in (408, 429, 500, 502, 503, 504)},
    "a reset": reset,
    "a short answer": shorter,
    "silence": silent,
    "no answer": hang_up,
    "a trickle": trickling,
}


@pytest.mark.parametrize("kind", PASSING)
def test_what_may_pass_is_tried_again_from_where_it_stopped(hub: Hub, kind: str) -> None:
    hub.faults["weights.safetensors"] = [PASSING[kind]]
    assert read(patience=SHORT) == DATA[1000:200_000]
    starts = [int(asked[1]["Range"][6:].split("-")[0]) for asked in hub.asked]
    assert starts == sorted(starts)
    assert (starts[-1] > 1000) == (kind in ("a reset", "a short answer", "a trickle"))
    assert len(WAITS) == len(starts) - 1 > 0


@pytest.mark.parametrize("kind", PASSING)
def test_what_does_not_pass_ends_in_a_sentence_that_says_how_to_go_on(hub: Hub, kind: str) -> None:
    hub.faults["weights.safetensors"] = [PASSING[kind]] * 20
    begin = time.monotonic()
    with pytest.raises(
        CheckpointError, match=r"weights.* in 3 tries \(.*\); run the same command again later: .* resumes"
    ):
        read(patience=replace(QUICK, window_s=0.2, answer_s=0.3))
    assert time.monotonic() - begin < 5
    assert len(WAITS) == 2


def test_waits_grow_to_a_bound_and_follow_what_the_hub_asks(hub: Hub) -> None:
    tries, waits = Tries("x", Patience()), []
    for _ in range(TRIES - 1):
        waits.append(tries.failed(Passing("HTTP 503")))
    assert all(2**i / 2 <= wait <= min(2**i, LONGEST_WAIT) for i, wait in enumerate(waits))
    with pytest.raises(CheckpointError, match=f"in {TRIES} tries"):
        tries.failed(Passing("HTTP 503"))
    tries = Tries("x", Patience())
    assert all(tries.failed(Passing("a reset"), progress=1 << 20) <= 1 for _ in range(100))

    hub.faults["weights.safetensors"] = [
        status(429, Retry_After="7"),
        status(429, RateLimit='"api";r=0;t=55'),
        status(503, Retry_After="Wed, 21 Oct 2015 07:28:00 GMT"),
    ]
    assert read(patience=replace(QUICK, tries=5)) == DATA[1000:200_000]
    assert [round(wait - 0.5) for wait in WAITS] == [7, 55, 0]
    hub.faults["weights.safetensors"] = [status(429, Retry_After=str(int(LONGEST_ASKED_WAIT) + 1))]
    with pytest.raises(CheckpointError, match=r"asks to wait 301 s .*run the same command again then"):
        read()


def test_a_slow_but_honest_line_is_waited_for(hub: Hub) -> None:
    """200 KB/s, which is several times the least rate, in windows of 0.2 s."""
    assert LEAST_RATE * 4 < 200_000
    blocks = [DATA[i : i + 4000] for i in range(1000, 200_000, 4000)]
    blocks[-1] = DATA[197_000:200_000]
    hub.faults["weights.safetensors"] = [
        sending(206, lambda: (time.sleep(0.02) or block for block in blocks), **part(1000, 200_000))
    ]
    assert read(patience=replace(QUICK, window_s=0.2)) == DATA[1000:200_000]
    assert len(hub.asked) == 1


def test_headers_that_trickle_or_never_end_are_left(hub: Hub) -> None:
    def slowly(to: Any) -> None:
        to.wfile.write(b"HTTP/1.1 206 Partial Content\r\n")
        for _ in range(500):
            to.wfile.write(b"x")
            time.sleep(0.02)

    def hints(to: Any) -> None:
        while True:
            to.wfile.write(b"HTTP/1.1 103 Early Hints\r\n\r\n")
            time.sleep(0.001)

    for fault in (slowly, hints):
        hub.faults["weights.safetensors"] = [fault] * 2
        with pytest.raises(CheckpointError, match=r"no answer within 0.3 s"):
            read(patience=replace(QUICK, tries=2, answer_s=0.3))
    until = time.monotonic() + 5
    while any(thread.name == "hub" for thread in threading.enumerate()):
        assert time.monotonic() < until, "the threads that received them end"
        time.sleep(0.01)


REFUSED: dict[str, tuple[Fault, str]] = {
    "gated, not logged in": (
        status(401, X_Error_Code="GatedRepo"),
        r"gated: accept its terms at \S+/some-lab/tiny-moe",
    ),
    "gated, no access": (status(403, X_Error_Code="GatedRepo"), "gated: accept its terms at .*hf auth login.*HF_TOKEN"),
    "a bad token": (status(401, X_Error_Message="Invalid credentials in Authorization header"), "the token for none"),
    "a weak token": (status(403, X_Error_Message="no\x1bscope"), r"may not be read with this token .*\(no scope\)"),
    "none": (status(401, X_Error_Code="RepoNotFound"), "none of that name, or it is private.*hf auth login"),
    "no revision": (status(404, X_Error_Code="RevisionNotFound"), "has no revision '0123456789abcdef"),
    "no file": (status(404, X_Error_Code="EntryNotFound"), "has no weights.safetensors, although"),
    "no such range": (status(416), "with HTTP 416"),
    "a made-up status": (status(299), "with HTTP 299"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_refusal_says_what_to_do(hub: Hub, kind: str) -> None:
    fault, sentence = REFUSED[kind]
    hub.faults["weights.safetensors"] = [fault]
    with pytest.raises(CheckpointError, match=sentence) as caught:
        read()
    assert "hf_secret" not in str(caught.value)
    assert not WAITS


def test_a_malformed_token_is_not_told(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_sec\nret")
    with pytest.raises(CheckpointError, match="a header is malformed; look at the token in HF_TOKEN") as caught:
        read()
    assert "hf_sec" not in str(caught.value)


def test_the_token_goes_to_no_other_host(hub: Hub) -> None:
    other = Hub({"elsewhere": DATA})
    with serving(other) as address:
        other.faults["elsewhere"] = [sending(206, lambda: iter([DATA[1000:200_000]]), **part(1000, 200_000))]
        hub.faults["weights.safetensors"] = [status(302, Location=f"{address}/elsewhere")]
        assert read() == DATA[1000:200_000]
    assert hub.asked[0][1]["Authorization"] == "Bearer hf_secret"
    assert "Authorization" not in other.asked[0][1]
    assert other.asked[0][1]["Range"] == "bytes=1000-199999"
    headers = {"authorization": "Bearer x", "Range": "y"}
    for target, kept in (
        ("/other", True),
        ("https://hub:443/other", True),
        ("https://hub:8443/other", False),
        ("https://hub.other/", False),
        ("//user@other/", False),
    ):
        assert ("authorization" in redirected("https://hub/a", target, headers)[1]) == kept, target
    for target in ("http://hub/a", "file:///etc/passwd", "https://[", "https://hub:99999/"):
        with pytest.raises(CheckpointError, match="The hub redirects to"):
            redirected("https://hub/a", target, headers)


def test_redirects_end(hub: Hub) -> None:
    hub.faults["weights.safetensors"] = [status(302, Location=f"/{REPO}/resolve/{COMMIT}/weights.safetensors")] * 20
    with pytest.raises(CheckpointError, match="redirects more than 5 times"):
        read()
    hub.faults["weights.safetensors"] = [sending(302, endless, Location="/x/weights.safetensors"), status(404)]
    with pytest.raises(CheckpointError, match="none of that name"):
        read()


def repo(hub: Hub, folder: Path, listed: Listed | None = None, patience: Patience = QUICK) -> Repo:
    remote = Remote(REPO, COMMIT, patience)
    files = list_files(remote)[1]
    if listed is not None:
        files["weights.safetensors"] = listed
    return Repo(remote, files, folder, lambda count: None)


@pytest.mark.parametrize("size", ["300000", -1, None, 1.5, True, 10**30, 1 << 60, [], 299_999, float("inf")])
def test_a_size_that_is_none_is_asked_for_in_another_way(hub: Hub, tmp_path: Path, size: Any) -> None:
    hub.listing = lambda data: data["siblings"][0].update(size=size)
    found = repo(hub, tmp_path)
    if size == 299_999:
        assert found.files["weights.safetensors"].size is None, "what contradicts itself counts for nothing"
    assert found.fetch("weights.safetensors").read_bytes() == DATA
    hub.listing = lambda data: data["siblings"][0].pop("size") and data["siblings"][0]["lfs"].pop("size")
    assert repo(hub, tmp_path).size("weights.safetensors") == SIZE


def test_a_file_without_a_size_or_digest_is_refused(hub: Hub, tmp_path: Path) -> None:
    digest = list_files(Remote(REPO, COMMIT, QUICK))[1]["weights.safetensors"].digest
    for answer in (
        sending(206, endless, Content_Range="bytes 0-0/*"),
        sending(206, endless, Content_Range=f"bytes 0-0/{1 << 55}"),
        sending(200, endless),
    ):
        hub.faults["weights.safetensors"] = [answer]
        with pytest.raises(CheckpointError, match=r"does not tell how large weights.safetensors"):
            repo(hub, tmp_path, Listed(None, digest)).fetch("weights.safetensors")
    with pytest.raises(CheckpointError, match=r"gives no digest of weights.safetensors"):
        repo(hub, tmp_path, Listed(SIZE, "")).fetch("weights.safetensors")
    assert not list(tmp_path.iterdir())
    assert not any("--" in asked[1].get("Range", "") for asked in hub.asked)


def test_an_empty_file_is_fetched_without_a_question(hub: Hub, tmp_path: Path) -> None:
    hub.files["weights.safetensors"] = b""
    assert repo(hub, tmp_path).fetch("weights.safetensors").read_bytes() == b""
    with pytest.raises(CheckpointError, match="cut short"):
        repo(hub, tmp_path).header("weights.safetensors")


def test_a_stopped_download_goes_on_in_the_next_run(hub: Hub, tmp_path: Path) -> None:
    half = SIZE // 2
    told: list[int] = []
    hub.faults["weights.safetensors"] = [
        sending(200, lambda: iter([DATA[:half]]), Content_Length=str(SIZE)),
        *[status(503)] * 3,
    ]
    with pytest.raises(CheckpointError, match="it resumes there"):
        repo(hub, tmp_path).fetch("weights.safetensors")
    assert (tmp_path / f"weights.safetensors{PART}").read_bytes() == DATA[:half]
    found = replace(repo(hub, tmp_path), report=told.append)
    assert found.fetch("weights.safetensors").read_bytes() == DATA
    assert hub.asked[-1][1]["Range"] == f"bytes={half}-{SIZE - 1}"
    assert sum(told) == SIZE
    assert [path.name for path in tmp_path.iterdir()] == ["weights.safetensors"]
    for damaged in (DATA + b"x", b"\0" * half):
        (tmp_path / "weights.safetensors").rename(tmp_path / f"weights.safetensors{PART}")
        (tmp_path / f"weights.safetensors{PART}").write_bytes(damaged)
        assert repo(hub, tmp_path).fetch("weights.safetensors").read_bytes() == DATA


LISTINGS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no commit": (lambda data: data.update(sha="main"), "names no commit"),
    "a commit that leads elsewhere": (lambda data: data.update(sha="../../x"), "names no commit"),
    "no files": (lambda data: data.update(siblings=None), "lists no files"),
    "files that are none": (lambda data: data["siblings"].append(3), "lists no files"),
    "a name that is none": (lambda data: data["siblings"].append({"rfilename": 3}), "lists no files"),
    "a file twice": (lambda data: data["siblings"].append(data["siblings"][0]), "a file of .* twice"),
}


@pytest.mark.parametrize("kind", LISTINGS)
def test_a_list_that_is_none_is_refused(hub: Hub, kind: str) -> None:
    hub.listing, sentence = LISTINGS[kind]
    with pytest.raises(CheckpointError, match=sentence):
        list_files(Remote(REPO, None, QUICK))


def test_a_list_without_end_is_left(hub: Hub) -> None:
    hub.faults["list"] = [sending(200, endless)]
    with pytest.raises(CheckpointError, match="in more than 8,388,608 bytes"):
        list_files(Remote(REPO, None, QUICK))
    for text in (b"[" * 100_000, json.dumps(hub.info()).encode("utf-32-be"), b'{"sha": "\xff"}', b"9" * 5000):
        hub.faults["list"] = [sending(200, lambda text=text: iter([text]))]
        with pytest.raises(CheckpointError, match="in what is no JSON"):
            list_files(Remote(REPO, None, QUICK))


def test_small_files_have_bounds(hub: Hub, tmp_path: Path) -> None:
    hub.files["model.safetensors"] = DATA
    hub.listing = lambda data: [
        file.update(size=17 << 20) for file in data["siblings"] if "config" in file["rfilename"]
    ]
    with pytest.raises(CheckpointError, match=r"config\.json of .* is larger than 16,777,216 bytes"):
        open_hub_checkpoint(REPO, None, tmp_path, lambda count: None, QUICK)
    hub.listing = lambda data: None
    hub.faults["config.json"] = [sending(200, endless)]
    with pytest.raises(CheckpointError, match=r"sends more of config\.json"):
        open_hub_checkpoint(REPO, None, tmp_path, lambda count: None, QUICK)


def test_the_size_for_a_sentence_is_told_soon_or_not_at_all(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub_bytes(REPO) == SIZE
    monkeypatch.setattr("mlx_ttd.store.hub_size.SECONDS", 0.3)
    hub.faults["list"] = [sending(200, lambda: (time.sleep(0.05) or b" " * 100_000 for _ in range(80)))]
    begin = time.monotonic()
    assert hub_bytes(REPO) is None
    assert time.monotonic() - begin < 2


@pytest.fixture
def model(hub: Hub, tmp_path: Path) -> Hub:
    hub.files = {path.name: path.read_bytes() for path in tiny(tmp_path / "source").iterdir()}
    return hub


def test_a_busy_hub_ends_a_conversion_with_what_resumes_it(
    model: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_ttd.store.hub_patience.FIRST_WAIT", 0.001)
    model.faults["list"] = [status(503)] * 2
    model.faults["model.safetensors"] = [status(503)] * (TRIES - 1)
    convert(REPO, tmp_path / "one.ttd")
    model.faults["model.safetensors"] = [status(503)] * TRIES
    with pytest.raises(CheckpointError, match="run the same command again later"):
        convert(REPO, tmp_path / "two.ttd")
    convert(REPO, tmp_path / "two.ttd")
    assert {p.name: p.read_bytes() for p in (tmp_path / "one.ttd").glob("*.*")} == {
        p.name: p.read_bytes() for p in (tmp_path / "two.ttd").glob("*.*")
    }


def test_a_header_that_was_not_the_file_s_is_refused(model: Hub, tmp_path: Path) -> None:
    data = model.files["model.safetensors"]
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    kinds: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for entry in header.values():
        kinds[str(entry.get("shape")), len(str(entry.get("data_offsets")))].append(entry)
    one, two = next(same for same in kinds.values() if len(same) > 1)[:2]
    one["data_offsets"], two["data_offsets"] = two["data_offsets"], one["data_offsets"]
    text = json.dumps(header, separators=(",", ":")).encode()
    swapped = data[:8] + text.ljust(start - 8) + data[start:]
    assert len(swapped) == len(data)
    guess = min(len(data), 1 << 20)
    model.faults["model.safetensors"] = [sending(206, lambda: iter([swapped[:guess]]), **part(0, guess, len(data)))]
    with pytest.raises(CheckpointError, match="has another header than the hub gave for it before"):
        convert(REPO, tmp_path / "dst")


def test_names_that_lead_out_or_are_alike_are_refused(model: Hub, tmp_path: Path) -> None:
    for names, sentence in (
        ({"a": "../x.safetensors"}, "leads outside the checkpoint"),
        ({"a": "/etc/passwd"}, "leads outside the checkpoint"),
        ({"a": "m.safetensors", "b": "M.safetensors"}, "two whose names are alike"),
        ({str(i): f"{i}.safetensors" for i in range(4097)}, "more than 4,096 shards"),
    ):
        model.files["model.safetensors.index.json"] = json.dumps({"weight_map": names}).encode()
        model.files |= dict.fromkeys(names.values(), b"x")
        with pytest.raises(CheckpointError, match=sentence):
            open_hub_checkpoint(REPO, None, tmp_path / "cache", lambda count: None, QUICK)
    assert not (tmp_path / "x.safetensors").exists()


@pytest.mark.parametrize("place", ["list", "config.json", "model.safetensors"])
def test_an_interrupt_ends_every_wait_at_once(model: Hub, tmp_path: Path, place: str) -> None:
    """By a real signal, where a line stalls: before the list, in a small file, and in a shard on the reading thread."""
    stalled = threading.Event()

    def stall(to: Any) -> None:
        stalled.set()
        time.sleep(5)

    def interrupt() -> None:
        stalled.wait(20)
        time.sleep(0.2)
        begin.append(time.monotonic())
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    begin: list[float] = []
    whole = model.files["model.safetensors"]
    guess = min(len(whole), 1 << 20)
    honest = sending(206, lambda: iter([whole[:guess]]), **part(0, guess, len(whole)))
    model.faults[place] = [honest, stall] if place == "model.safetensors" else [stall]
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        convert(REPO, tmp_path / "dst")
    assert time.monotonic() - begin[0] < 1
    convert(REPO, tmp_path / "dst")


def test_errors_of_the_disk_are_not_the_hub_s(model: Hub, tmp_path: Path) -> None:
    (tmp_path / "dst.partial" / "source" / COMMIT / f"model.safetensors{PART}").mkdir(parents=True)
    with pytest.raises(ConversionError, match=r"Writing .* stopped: Is a directory"):
        convert(REPO, tmp_path / "dst")
