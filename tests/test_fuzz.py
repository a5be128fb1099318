"""Damaged and made-up files of every kind are read or refused: soon, in bounds, and without running anything."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable

import pytest
from fuzz import TARGETS, check, warm, watching
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


@pytest.fixture(scope="module", params=TARGETS)
def target(request, tmp_path_factory):
    made = TARGETS[request.param](tmp_path_factory.mktemp(request.param))
    warm(made)
    return made


@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(rng=st.randoms(use_true_random=False))
def test_hostile_input_is_read_or_refused(target, rng: random.Random) -> None:
    check(target, target.make(rng, target.seeds))


def test_intact_files_are_taken(target):
    assert all(check(target, seed) for seed in target.seeds)


def fields(change: Callable[[dict], object]) -> Callable[[bytes], bytes]:
    """A change of a JSON file's fields."""

    def changed(seed: bytes) -> bytes:
        data = json.loads(seed)
        change(data)
        return json.dumps(data).encode()

    return changed


def header(change: Callable[[dict], object]) -> Callable[[bytes], bytes]:
    """A change of a safetensors header's fields."""

    def changed(seed: bytes) -> bytes:
        start = 8 + int.from_bytes(seed[:8], "little")
        text = fields(change)(seed[8:start])
        return len(text).to_bytes(8, "little") + text + seed[start:]

    return changed


def flatten(tensors: dict) -> None:
    """Every array with its own bytes in one dimension less."""
    for name, entry in tensors.items():
        if name not in ("__metadata__", "tokens"):
            first, *rest = entry["shape"]
            entry["shape"] = [first * math.prod(rest[:1]), *rest[1:]]


FOUND = {
    "generation_config quotes a long value": fields(lambda d: d.update(temperature="9" * 5000)),
    "checkpoint_index names a long file": fields(lambda d: d["weight_map"].update(a="9" * 5000)),
    "checkpoint_config claims thousands of layers": fields(lambda d: d["text_config"].update(num_hidden_layers=4001)),
    "chat_template names a character": lambda seed: b"{{ '\\N{BULLET}' }}",
    "tokenizer_config has a surrogate": fields(lambda d: d.update(eos_token="\ud800")),
    "trace_header is nested deeply": lambda seed: b"[" * 5000 + b"]" * 5000,
    "trace_header claims layers without end": fields(lambda d: d.update(layers=10**12)),
    "trace_arrays is cut": lambda seed: seed[:7],
    "saved_state has other shapes": header(flatten),
    "saved_state has a number for a fingerprint": header(lambda d: d["__metadata__"].update(fingerprint="1.5")),
}


@pytest.mark.parametrize("found", FOUND)
def test_what_fuzzing_found_is_refused_or_harmless(found, tmp_path):
    target = TARGETS[found.split()[0]](tmp_path)
    warm(target)
    taken = check(target, FOUND[found](target.seeds[0]))
    assert taken == found.startswith(("tokenizer_config", "chat_template"))


def test_what_a_reader_must_not_do_is_seen(tmp_path):
    import pickle

    with watching() as events:
        (tmp_path / "x").write_text("y")
        pickle.loads(pickle.dumps(pytest.approx))
        eval("1")
    assert [event.split()[0] for event in events] == ["open", "pickle.find_class", "compile", "exec"]
