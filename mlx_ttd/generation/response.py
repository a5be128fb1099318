"""What generation gives back: chunks while it runs, a response at its end."""

from __future__ import annotations

import hashlib
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import mlx.core as mx
import numpy as np

from .decode import Step

FinishReason = Literal["stop", "length", "interrupted"]


def token_digest(tokens: Sequence[int]) -> str:
    """SHA-256 of the ids as little-endian int32."""
    return hashlib.sha256(np.asarray(tokens, "<i4").tobytes()).hexdigest()


def array_digest(array: np.ndarray) -> str:
    """SHA-256 of dtype, shape and little-endian bytes."""
    little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    head = f"{little.dtype.str}{little.shape}".encode()
    return hashlib.sha256(head + little.tobytes()).hexdigest()


@dataclass(frozen=True)
class Chunk:
    """A piece of a running generation; `text` may be empty while bytes of a character or a stop string are held back.

    reasoning: text inside <think> where the template opens it or the answer begins with it. tokens: the ids behind this
    piece. logprobs: of those tokens, natural log, None unless asked for. tool_calls: parsed calls, each when it is
    complete. finish_reason: in the last chunk.
    """

    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] | None = None
    reasoning: str = ""
    tool_calls: tuple[dict[str, Any], ...] = ()
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class Response:
    """A finished generation, or what there was of one before an exception: then finish_reason is "interrupted".

    digest: of `tokens`; logits_digest: of the last step's logits f32 [vocab]. Seconds are wall time: to the first
    token, and of all steps after it. peak_bytes: peak resident set of the process.
    """

    text: str
    tokens: list[int]
    prompt_tokens: int
    cached_tokens: int
    finish_reason: FinishReason
    digest: str
    logits_digest: str
    first_token_seconds: float
    decode_seconds: float
    peak_bytes: int
    reasoning: str = ""
    logprobs: tuple[float, ...] | None = None
    tool_calls: tuple[dict[str, Any], ...] = field(default=())
    step_seconds: tuple[float, ...] = ()
    step_misses: tuple[int, ...] = ()

    def latency(self, percentile: float) -> float:
        """Seconds of a decode step at a percentile, such as 50 or 95."""
        return float(np.percentile(self.step_seconds, percentile))

    @property
    def tokens_per_second(self) -> float | None:
        """Decode rate after the first token; None when there was only one."""
        return (len(self.tokens) - 1) / self.decode_seconds if len(self.tokens) > 1 and self.decode_seconds else None


def peak_bytes() -> int:
    """Peak resident set of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Record:
    """What a `Response` needs to know of a generation, noted while it runs."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.started = time.perf_counter()
        self.first = self.last = self.started
        self.logits: mx.array | None = None
        self.chunks: list[Chunk] = []
        self.seconds: list[float] = []
        self.misses: list[int] = []

    def add(self, step: Step, chunk: Chunk, prompt_tokens: int, cached_tokens: int) -> None:
        self.prompt_tokens, self.cached_tokens = prompt_tokens, cached_tokens
        self.last = time.perf_counter()
        if not self.tokens:
            self.first = self.last
        self.tokens.append(step.token)
        self.chunks.append(chunk)
        self.logits = step.logits
        self.seconds.append(step.seconds)
        self.misses.append(step.misses)

    def response(self) -> Response:
        """Of at least one step."""
        chunks = self.chunks
        logprobs = [p for chunk in chunks if chunk.logprobs is not None for p in chunk.logprobs]
        return Response(
            text="".join(chunk.text for chunk in chunks),
            tokens=list(self.tokens),
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            finish_reason=chunks[-1].finish_reason or "interrupted",
            digest=token_digest(self.tokens),
            logits_digest=array_digest(np.array(self.logits)),
            first_token_seconds=self.first - self.started,
            decode_seconds=self.last - self.first,
            peak_bytes=peak_bytes(),
            reasoning="".join(chunk.reasoning for chunk in chunks),
            logprobs=tuple(logprobs) if logprobs else None,
            tool_calls=tuple(call for chunk in chunks for call in chunk.tool_calls),
            step_seconds=tuple(self.seconds),
            step_misses=tuple(self.misses),
        )
