"""Every option of a generation, with its default and its range."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import mlx.core as mx

from ..errors import OptionError
from .penalties import Processor, make_processors
from .sampling import Sampler, make_sampler


@dataclass(frozen=True)
class GenerationOptions:
    """How text is sampled and when it ends.

    temperature 0 is greedy; a seed of None picks one. top_k cuts before top_p. `processors` are called with the tokens
    so far and the f32 logits [vocab], and return logits. `stop` are strings; the text before the first of them is
    returned. ignore_eos: exactly max_tokens tokens. `force` are token ids to take in place of sampled ones, one a
    step and exactly those (teacher forcing). logprobs: the natural log p of each token, after the processors.
    `template` are variables of the chat template, such as enable_thinking. on_prefill(done, total) is called as the
    prompt is read.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    processors: Sequence[Processor] = ()
    stop: str | Sequence[str] = ()
    ignore_eos: bool = False
    force: Sequence[int] = ()
    logprobs: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
    on_prefill: Callable[[int, int], None] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "force", tuple(int(token) for token in self.force))
        whole = isinstance(self.max_tokens, int) and not isinstance(self.max_tokens, bool)
        if not whole or self.max_tokens < 1:
            raise OptionError(f"max_tokens is {self.max_tokens!r}; it must be an integer of at least 1.")

    def sampler(self) -> Sampler:
        """The sampler these options ask for. OptionError for a number out of range."""
        if self.force:
            forced = iter(self.force)
            return lambda logits: mx.array(next(forced))
        return make_sampler(self.temperature, self.top_k, self.top_p, self.min_p, self.seed)

    def all_processors(self, prompt_length: int) -> list[Processor]:
        """Penalties and bias, then `processors`."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty, self.logit_bias)
        return [*make_processors(*penalties, prompt_length), *self.processors]

    @property
    def length(self) -> int:
        """Tokens to make at most."""
        return len(self.force) or self.max_tokens

    @property
    def stops(self) -> bool:
        """Whether the model may end the text."""
        return not self.ignore_eos and not self.force

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


def generation_options(given: Mapping[str, Any]) -> GenerationOptions:
    """GenerationOptions from keyword arguments. OptionError names an unknown one."""
    unknown = set(given) - {f.name for f in fields(GenerationOptions)}
    if unknown:
        known = ", ".join(f.name for f in fields(GenerationOptions))
        raise OptionError(f"generation option {sorted(unknown)[0]!r} is unknown; known are {known}.")
    return GenerationOptions(**given)
