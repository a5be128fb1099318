"""What the engine replies while text is generated. `consults`: first something of the caller's is to be called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from ..generation import Chunk, Step


class Piece(NamedTuple):
    chunk: Chunk
    step: Step
    prompt_tokens: int
    cached_tokens: int
    consults: bool = False


class PromptRead(NamedTuple):
    """So many of the prompt's tokens have been read."""

    done: int
    total: int
    consults: bool


class Consult(NamedTuple):
    """The caller's processors are to change f32 logits [V], evaluated, of what follows `tokens`."""

    tokens: Sequence[int]
    logits: mx.array
    consults: bool = True
