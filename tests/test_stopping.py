"""Stop strings and stop tokens."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_ttd.errors import OptionError
from mlx_ttd.generation import stop_ids
from mlx_ttd.generation.stopping import StopStrings


def fed(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    strings = StopStrings(stops)
    text = "".join(map(strings.feed, pieces))
    return text + strings.finish(), strings.stopped


def at_first_end(stops: list[str], text: str) -> tuple[str, str | None]:
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.text("abc", max_size=30),
    st.lists(st.integers(0, 30), max_size=8),
)
def test_the_text_before_the_first_stop_for_any_cuts(stops, text, cuts):
    points = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(points)]
    assert fed(stops, pieces) == at_first_end(stops, text)


def test_only_a_possible_beginning_is_held_back():
    strings = StopStrings(["\n\nUser:"])
    assert strings.feed("Hello\n") == "Hello"
    assert strings.feed("World\n\nUs") == "\nWorld"
    assert strings.feed("er: hi") == ""
    assert strings.stopped == "\n\nUser:"
    assert strings.feed("more") == ""
    assert strings.finish() == ""


def test_one_string_or_none():
    assert fed("ab", ["xab"]) == ("x", "ab")
    assert fed([], ["xab"]) == ("xab", None)


@pytest.mark.parametrize("stops", ["", [""], ["a", ""], [3]])
def test_empty_stop_strings_are_refused(stops):
    with pytest.raises(OptionError, match="stop is"):
        StopStrings(stops)


def test_stop_ids_by_string_and_from_the_config():
    vocabulary = {"<|im_end|>": 5, "a": 0}
    assert stop_ids(vocabulary.get) == {5}
    assert stop_ids(vocabulary.get, [7, 5]) == {5, 7}
    assert stop_ids({}.get) == set()
