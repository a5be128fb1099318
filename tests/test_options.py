"""What callers may pass, numbers of numpy and MLX included, and the one sentence that they get for anything else."""

from __future__ import annotations

import os
from array import array

import mlx.core as mx
import numpy as np
import pytest

import mlx_ttd
from mlx_ttd.errors import OptionError, StateError, StoreError
from mlx_ttd.generation import GenerationOptions, generation_options
from mlx_ttd.options import make_options
from mlx_ttd.prompts import check_ids

MESSAGES = [{"role": "user", "content": "a"}]


@pytest.fixture(scope="module")
def llm():
    with mlx_ttd.load("demo", np.int64(300_000_000), context=np.int32(512), slots=np.uint8(6)) as loaded:
        yield loaded


@pytest.mark.parametrize(
    "ids",
    [
        (1, 2), range(1, 3), array("i", [1, 2]), np.array([1, 2]), np.array([1, 2], np.uint8), mx.array([1, 2]),
        [np.int64(1), mx.array(2)],
    ],
)  # fmt: skip
def test_ids_of_any_kind_of_integer(ids):
    found = check_ids(ids, 3)
    assert found == [1, 2]
    assert {type(token) for token in found} == {int}
    assert GenerationOptions(force=ids).force == (1, 2)


NO_IDS = [
    [1.7, 2.2], ["1", "2"], ["a"], [1, True], [np.True_], [float("nan")], [[1]], [mx.array([1])], np.array([1.0]),
    np.array([True]), np.ones((2, 2), int), mx.ones((2, 2), mx.int32), np.array(5), b"abc", None, 5, float("nan"),
    {1, 2}, {1: 2}, (i for i in (1, 2)), MESSAGES[0],
]  # fmt: skip


@pytest.mark.parametrize("prompt", NO_IDS)
def test_what_is_no_prompt_is_refused(llm, prompt):
    with pytest.raises(OptionError, match=r"the prompt .* must be a text, a list of chat messages, or token ids"):
        llm.generate(prompt, max_tokens=1)
    with pytest.raises(OptionError, match=r"force .* must be token ids"):
        GenerationOptions(force=prompt)


@pytest.mark.parametrize(
    "option",
    [
        {"stop": None}, {"stop": 5}, {"stop": [5]}, {"stop": b"ab"}, {"processors": None}, {"processors": [5]},
        {"processors": lambda tokens, logits: logits}, {"template": None}, {"template": {"messages": []}},
        {"template": {"tools": []}}, {"template": {"self": 1}}, {"template": {1: 2}}, {"tools": "x"}, {"tools": [5]},
        {"tools": MESSAGES[0]}, {"tools": [{"function": 5}]}, {"tools": [{"name": "a", "parameters": 5}]},
        {"tools": [{"name": "a", "parameters": {"properties": 5}}]}, {"logit_bias": [5]}, {"logit_bias": None},
        {"logit_bias": {10**12: 1.0}}, {"logit_bias": {5000: 1.0}}, {"on_prefill": 5}, {"temperature": True},
        {"temperature": "hot"}, {"top_p": None}, {"top_k": True}, {"min_p": [0.5]}, {"seed": 1.5}, {"seed": True},
        {"repetition_penalty": np.array([1, 2])}, {"presence_penalty": False}, {"max_tokens": True},
        {"max_tokens": np.float64(2)}, {"processors": [lambda tokens, logits: None]},
    ],
    ids=lambda option: str(option)[:40],
)  # fmt: skip
def test_a_generation_option_of_the_wrong_type_is_named(llm, option):
    name = next(iter(option)).removesuffix("s")
    with pytest.raises(OptionError, match=name) as caught:
        llm.generate(MESSAGES, **{"max_tokens": 2, **option})
    assert "\n" not in str(caught.value)


def test_options_in_numbers_of_numpy_are_those_numbers(llm):
    own = {
        "max_tokens": 3, "temperature": 0.5, "top_k": 50, "top_p": 0.75, "min_p": 0.0, "seed": 3,
        "repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 0.5, "logit_bias": {7: 1.5},
    }  # fmt: skip
    given = {
        "max_tokens": np.int64(3), "temperature": np.float32(0.5), "top_k": np.int32(50), "top_p": np.float16(0.75),
        "min_p": np.float64(0), "seed": np.uint64(3), "repetition_penalty": np.float32(1.5),
        "presence_penalty": np.int8(1), "frequency_penalty": np.float32(0.5),
        "logit_bias": {np.int64(7): np.float32(1.5)},
    }  # fmt: skip
    assert generation_options(given) == generation_options(own)
    assert llm.generate("And", **given).tokens == llm.generate("And", **own).tokens


def test_load_options_in_numbers_of_numpy_are_those_numbers(llm):
    assert (llm.options.memory, llm.context, llm.provider.slots) == (300_000_000, 512, 6)
    assert {type(value) for value in (llm.options.memory, llm.options.context, llm.options.slots)} == {int}
    assert make_options({"memory": 3e8}).memory == 300_000_000
    for given in ({"slots": True}, {"slots": np.float32(6)}, {"context": 5.0}, {"memory": np.True_}, {"memory": None}):
        with pytest.raises(OptionError, match=next(iter(given))):
            make_options(given)


@pytest.mark.parametrize("memory", [1.5, "1.5", "0.5 B", np.float32(1.5), np.float64(0.5), float("nan"), float("inf")])
def test_a_part_of_a_byte_is_no_memory(memory):
    with pytest.raises(OptionError, match="whole number of bytes"):
        make_options({"memory": memory})


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"path_or_id": None}, OptionError, "path, a hub id or 'demo'"),
        ({"path_or_id": b"demo"}, OptionError, "path, a hub id or 'demo'"),
        ({"path_or_id": "x" * 5000}, StoreError, "too long"),
        ({"path_or_id": "x/" * 2500}, StoreError, "too long"),
        ({"path_or_id": "demo", "share": "x"}, OptionError, "share='x' is a str"),
        ({"path_or_id": "demo", "replace": "no"}, OptionError, "replace='no' is a str"),
    ],
)
def test_load_refuses_what_names_no_store_or_model(given, error, words):
    with pytest.raises(error, match=words):
        mlx_ttd.load(**given)


def test_a_state_that_cannot_be_saved_leaves_nothing(llm, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    llm.generate("And", max_tokens=1)
    for path in ("missing/state", "folder", "file/state", "x" * 300, "a\0b"):
        with pytest.raises(StateError, match="cannot be saved") as caught:
            llm.save_state(tmp_path / path)
        assert "\n" not in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]
