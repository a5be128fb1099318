"""From sampled tokens to pieces of text: whole characters, stop strings, reasoning and tool calls apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..text import ReasoningSplitter, Tokenizer, ToolCallSplitter
from .decode import Step
from .logprobs import token_logprob
from .response import Chunk, FinishReason
from .stopping import StopStrings


class IdStream:
    """Chunks without text, for a store that has no tokenizer."""

    def __init__(self, stop_ids: frozenset[int], logprobs: bool):
        self.stop_ids, self.logprobs = stop_ids, logprobs

    def add(self, step: Step, last: bool) -> Chunk:
        """The chunk of one sampled token; `last`: no further token follows."""
        stopped = step.token in self.stop_ids
        return self._chunk(step, "", "stop" if stopped else "length" if last else None)

    def _chunk(self, step: Step, text: str, finish: FinishReason | None) -> Chunk:
        logprobs = (token_logprob(step.logits, step.token),) if self.logprobs else None
        return Chunk(text, (step.token,), logprobs, finish_reason=finish)


class TextStream(IdStream):
    """Chunks of one generation as text.

    inside_reasoning: the prompt has opened a <think> block. tools: schemas by which arguments of tool calls are typed;
    None leaves tool calls in the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_ids: frozenset[int],
        stop_strings: Sequence[str],
        inside_reasoning: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        logprobs: bool,
    ):
        super().__init__(stop_ids, logprobs)
        self._detokenizer = tokenizer.detokenizer()
        self._stop = StopStrings(stop_strings)
        # Text never holds a special token, so one that is a stop string stops by its id.
        special = map(tokenizer.special_id, self._stop.stops)
        self.stop_ids |= {token for token in special if token is not None}
        self._reasoning = ReasoningSplitter(inside_reasoning)
        self._tools = None if tools is None else ToolCallSplitter(tools)

    def add(self, step: Step, last: bool) -> Chunk:
        """The piece that one sampled token settles; `last`: no further token follows."""
        finish: FinishReason | None = "length" if last else None
        text = ""
        if step.token in self.stop_ids:
            finish = "stop"
        else:
            text = self._stop.feed(self._detokenizer.add(step.token))
        if finish is not None and self._stop.stopped is None:
            text += self._stop.feed(self._detokenizer.finish())
        if self._stop.stopped is not None:
            finish = "stop"
        elif finish is not None:
            text += self._stop.finish()
        return self._split(self._chunk(step, text, finish))

    def _split(self, chunk: Chunk) -> Chunk:
        ends = chunk.finish_reason is not None
        pieces = [self._reasoning.feed(chunk.text), *([self._reasoning.finish()] if ends else [])]
        reasoning, text = ("".join(part) for part in zip(*pieces, strict=True))
        calls: list[dict[str, Any]] = []
        if self._tools is not None:
            text, calls = self._tools.feed(text)
            text += self._tools.finish() if ends else ""
        return Chunk(text, chunk.tokens, chunk.logprobs, reasoning, tuple(calls), chunk.finish_reason)
