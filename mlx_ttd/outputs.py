"""What ends a generation, and how its tokens become chunks of text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .generation import GenerationOptions, IdStream, TextStream, read_eos_ids, stop_ids
from .text import Tokenizer, opens_reasoning


def ends_of(store: Path, tokenizer: Tokenizer | None) -> frozenset[int]:
    """The ids by which a store's model ends its text: all that any of its configs names."""
    eos = read_eos_ids(store)
    return eos if tokenizer is None else stop_ids(tokenizer.token_id, eos | tokenizer.eos_ids)


def output_stream(
    tokenizer: Tokenizer | None, ends: frozenset[int], chat: bool, ids: Sequence[int], options: GenerationOptions
) -> IdStream:
    """Makes the chunks of the answer to a prompt of `ids`; without a tokenizer, chunks without text."""
    stops = ends if options.stops else frozenset()
    if tokenizer is None:
        return IdStream(stops, options.logprobs)
    inside = chat and opens_reasoning(tokenizer.decode(ids[-64:]))
    return TextStream(tokenizer, stops, options.stop_strings, inside, options.tools, options.logprobs)
