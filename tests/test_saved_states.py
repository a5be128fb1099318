"""Saved states: streamed in windows, durable or not there at all, and refused whenever they are not what they claim."""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import struct
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from live import live

import mlx_ttd
from mlx_ttd import state
from mlx_ttd.errors import ContextError, StateError
from mlx_ttd.spec import model_spec
from mlx_ttd.state import restoring, windows
from mlx_ttd.state.saving import arrays_of

SPEC = model_spec(json.loads((mlx_ttd.demo_path() / "config.json").read_text()))
MARK = {"store": "x", "version": "1"}


def filled(tokens: int, context: int = 64, bits: int = 16, seed: int = 0) -> list[state.LayerState]:
    """A state of random numbers after `tokens`, with a capacity of `context`."""
    rng, layers = np.random.default_rng(seed), state.new_state(SPEC, context, mx.float32, bits)
    for layer in layers:
        for array in layer.arrays:
            if array.dtype == mx.uint32:
                array[:] = mx.array(rng.integers(0, 2**32, array.shape, np.uint32))
            else:
                array[:] = mx.array(rng.standard_normal(array.shape, np.float32)).astype(array.dtype)
        layer.offset = tokens
    mx.eval([layer.arrays for layer in layers])
    return layers


def restored(
    path: Path, context: int = 64, bits: int = 16, fingerprint=MARK
) -> tuple[list[state.LayerState], list[int]]:
    empty = state.new_state(SPEC, context, mx.float32, bits)
    with state.saved_state(path, empty, fingerprint, SPEC.vocab) as saved:
        saved.fill(empty)
    return empty, saved.tokens


def used(layers: list[state.LayerState], tokens: int) -> list[bytes]:
    arrays = [(a, s) for layer in layers for a, s in zip(layer.arrays, layer.shapes(tokens), strict=True)]
    return [bytes(mx.contiguous(a[:, : s[1]]).view(mx.uint8)) for a, s in arrays]


def changed(path: Path, change) -> None:
    """The file with its header's fields and its data changed, its digest taken out."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8:start]), bytearray(raw[start:])
    header["__metadata__"].pop("sha256", None)
    text = json.dumps(change(header, data) or header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.fixture
def saved(tmp_path) -> Path:
    state.save(tmp_path / "state", filled(5), [1, 2, 3, 4, 5], MARK)
    return tmp_path / "state"


@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("window", [64, 1000, 2 << 20])
def test_a_state_comes_back_to_the_bit_whatever_the_windows(tmp_path, monkeypatch, bits, window):
    monkeypatch.setattr(windows, "WINDOW_BYTES", window)
    layers = filled(50, bits=bits)
    state.save(tmp_path / "state", layers, range(50), MARK)
    again, tokens = restored(tmp_path / "state", context=80, bits=bits)
    assert tokens == list(range(50))
    assert [layer.offset for layer in again] == [50] * len(layers)
    assert used(again, 50) == used(layers, 50)


def test_a_file_is_a_plain_safetensors_file_and_an_older_one_is_read(tmp_path):
    layers = filled(5)
    arrays = {name: mx.contiguous(a[:, : s[1]]) for name, (a, s) in arrays_of(layers, 5).items()}
    arrays["tokens"] = mx.array([1, 2, 3, 4, 5], mx.int32)
    mx.save_safetensors(str(tmp_path / "older.safetensors"), arrays, {"fingerprint": json.dumps(MARK)})
    state.save(tmp_path / "state.safetensors", layers, [1, 2, 3, 4, 5], MARK)
    found = mx.load(str(tmp_path / "state.safetensors"))
    assert found.keys() == arrays.keys()
    assert all(mx.array_equal(found[name], arrays[name]) for name in found)
    again, tokens = restored(tmp_path / "older.safetensors")
    assert tokens == [1, 2, 3, 4, 5]
    assert used(again, 5) == used(layers, 5)


def resident_peak(work) -> int:
    """Bytes by which the process grew at most during `work`."""
    status = Path("/proc/self/status")

    def size(key: str) -> int:
        return int(re.search(rf"{key}:\s*(\d+)", status.read_text())[1]) * 1024

    Path("/proc/self/clear_refs").write_text("5")
    before = size("VmRSS")
    work()
    return size("VmHWM") - before


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="not run: reads /proc")
def test_neither_saving_nor_restoring_copies_a_state(tmp_path):
    tokens = 60_000
    layers = filled(tokens, context=tokens, bits=32)
    held = sum(layer.nbytes for layer in layers)
    assert held > 50e6
    path = tmp_path / "state"
    for _ in range(2):
        mx.reset_peak_memory()
        active = mx.get_active_memory()
        grown = resident_peak(lambda: state.save(path, layers, [7] * tokens, MARK))
        assert grown < 16e6
        assert mx.get_peak_memory() - active < 1e6
    grown = resident_peak(lambda: restored(path, context=tokens, bits=32))
    assert grown < held + 24e6
    assert mx.get_peak_memory() - active < held + 4 * windows.WINDOW_BYTES


def test_a_state_goes_on_in_place_after_it_was_saved(tmp_path):
    """A view of an array that outlived the save would make the next step copy it."""
    layers = filled(5, context=4096)
    state.save(tmp_path / "state", layers, [1] * 5, MARK)
    kv = next(layer for layer in layers if isinstance(layer, state.KVState))
    mx.reset_peak_memory()
    active = mx.get_active_memory()
    rows = mx.ones((1, SPEC.kv_heads, SPEC.head_dim))
    kv.append(rows, rows)
    mx.eval(kv.arrays)
    assert mx.get_peak_memory() - active < kv.nbytes / 4


def token(value: int):
    def change(header, data):
        start, _ = header["tokens"]["data_offsets"]
        data[start : start + 4] = struct.pack("<i", value)

    return change


def number(word: int):
    def change(header, data):
        start, _ = header["3.0"]["data_offsets"]
        data[start : start + 2] = struct.pack("<H", word)

    return change


def field(name: str, key: str, value):
    return lambda header, data: header[name].update({key: value})


def one_token_less(header, data):
    start, end = header["tokens"]["data_offsets"]
    del data[end - 4 : end]
    header["tokens"].update(shape=[4], data_offsets=[start, end - 4])
    for name, entry in header.items():
        if name not in ("tokens", "__metadata__") and entry["data_offsets"][0] >= end:
            entry["data_offsets"] = [at - 4 for at in entry["data_offsets"]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (token(SPEC.vocab), "outside the vocabulary"),
        (token(-1), "outside the vocabulary"),
        (number(0x7FC0), "not finite"),
        (number(0xFF80), "not finite"),
        (one_token_less, "where this model with these tokens has"),
        (field("tokens", "dtype", "U32"), "no list of tokens"),
        (field("tokens", "dtype", "F32"), "no list of tokens"),
        (field("tokens", "shape", [5, 1]), "no list of tokens"),
        (field("3.0", "dtype", "F16"), "where this model"),
        (lambda header, data: data.extend(b"\0" * 10), "belong to no array"),
        (lambda header, data: data.__delitem__(slice(-1, None)), "cut short or damaged"),
        (lambda header, data: header.pop("3.0") and None, "missing"),
        (lambda header, data: header.update(more=header["3.0"]), "overlaps"),
        (lambda header, data: header.update({"9.9": dict(header["3.0"], shape=[0], data_offsets=[0, 0])}), "has none"),
        (lambda header, data: header["__metadata__"].update(fingerprint="[]"), "wrong kind"),
        (lambda header, data: header["__metadata__"].update(fingerprint="[" * 5000), "not a saved state"),
        (lambda header, data: header["__metadata__"].update(sha256="0" * 64), "does not match its digest"),
        (lambda header, data: header["__metadata__"].update(note="x" * (2 << 20)), "longer than any state's"),
        (lambda header, data: header.pop("__metadata__") and None, "not a saved state"),
    ],
)
def test_a_hostile_state_is_refused_in_a_sentence(saved, change, words):
    changed(saved, change)
    with pytest.raises(StateError, match=words) as told:
        restored(saved)
    assert "\n" not in str(told.value)


def test_a_changed_bit_is_told_by_the_digest(saved):
    raw = bytearray(saved.read_bytes())
    raw[-3] ^= 1
    saved.write_bytes(raw)
    with pytest.raises(StateError, match="does not match its digest"):
        restored(saved)


def test_a_state_longer_than_the_context_or_of_another_model_is_refused(saved):
    with pytest.raises(ContextError, match="context=6"):
        restored(saved, context=4)
    with pytest.raises(StateError, match="made with version '1', this model has '2'"):
        restored(saved, fingerprint={**MARK, "version": "2"})


@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "link to a folder", "link to a pipe"])
def test_what_is_no_plain_file_is_neither_written_nor_read(tmp_path, kind):
    path = tmp_path / "state"
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    if kind.startswith("link"):
        path.symlink_to(tmp_path / kind.split()[-1])
    else:
        path = Path("/dev/null") if kind == "device" else tmp_path / kind
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(StateError, match="no plain file"):
        state.save(path, filled(1), [1], MARK)
    with pytest.raises(StateError, match=r"no plain file|Is a directory"):
        restored(path)
    assert sorted(os.listdir(tmp_path)) == before


def test_a_link_to_a_plain_file_is_followed(saved, tmp_path):
    (tmp_path / "link").symlink_to(saved)
    state.save(tmp_path / "link", filled(2), [8, 9], MARK)
    assert (tmp_path / "link").is_symlink()
    assert restored(saved)[1] == [8, 9]


def test_a_state_is_durable_before_it_has_its_name(tmp_path, monkeypatch):
    events, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append("fsync"), fsync(fd))[1])
    monkeypatch.setattr(Path, "replace", lambda a, b: (events.append("replace"), replace(a, b))[1])
    state.save(tmp_path / "state", filled(2), [8, 9], MARK)
    assert events == ["fsync", "replace", "fsync"]


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_disk_that_fails_leaves_what_was_there(saved, tmp_path, monkeypatch, reason):
    before = saved.read_bytes()

    def fail(fd):
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StateError, match=f"cannot be saved as .*{os.strerror(reason)}"):
        state.save(saved, filled(2), [8, 9], MARK)
    assert saved.read_bytes() == before
    assert os.listdir(tmp_path) == ["state"]


def test_an_interrupt_leaves_what_was_there(saved, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    before = saved.read_bytes()
    monkeypatch.setattr("mlx_ttd.state.saving.require_finite", interrupt)
    with pytest.raises(KeyboardInterrupt):
        state.save(saved, filled(2), [8, 9], MARK)
    assert saved.read_bytes() == before
    assert os.listdir(tmp_path) == ["state"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="not run: reads /proc")
def test_a_full_disk_is_told(tmp_path, monkeypatch):
    full = functools.partial(open, "/dev/full", "wb")
    monkeypatch.setattr("mlx_ttd.state.saving.open", lambda path, mode: full(), raising=False)
    with pytest.raises(StateError, match="No space left"):
        state.save(tmp_path / "state", filled(2), [8, 9], MARK)
    assert os.listdir(tmp_path) == []


def test_a_state_with_numbers_that_are_none_or_cut_short_is_not_saved(tmp_path):
    layers = filled(3)
    layers[0].recurrent[0, 0, 0] = float("nan")
    with pytest.raises(StateError, match="not finite"):
        state.save(tmp_path / "state", layers, [1, 2, 3], MARK)
    for tokens in ([1, 2], []):
        with pytest.raises(StateError, match="no whole sequence"):
            state.save(tmp_path / "state", filled(3), tokens, MARK)
    assert os.listdir(tmp_path) == []


def test_a_refused_file_costs_the_live_sequence_nothing_and_one_that_fails_later_leaves_none(tmp_path, monkeypatch):
    path = tmp_path / "state"
    with mlx_ttd.load("demo", "150MB") as llm:
        prompt = list(range(2, 40))
        wanted = llm.generate(prompt, max_tokens=6, ignore_eos=True)
        llm.save_state(path)
        before = live(llm)
        whole = path.read_bytes()
        path.write_bytes(whole[:-1])
        with pytest.raises(StateError):
            llm.restore_state(path)
        assert live(llm) is before
        path.write_bytes(whole)
        fills = iter(range(100))

        def fail(file, into, where, fill=restoring._fill):
            if next(fills) > 30:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            fill(file, into, where)

        with monkeypatch.context() as patch:
            patch.setattr("mlx_ttd.state.restoring._fill", fail)
            with pytest.raises(StateError, match="Input/output error"):
                llm.restore_state(path)
        assert live(llm) is None
        assert llm.generate(prompt, max_tokens=6, ignore_eos=True).logits_digest == wanted.logits_digest
        llm.restore_state(path)
        again = llm.generate([*prompt, *wanted.tokens, 5], max_tokens=6, ignore_eos=True)
        assert again.cached_tokens == len(prompt) + 5
