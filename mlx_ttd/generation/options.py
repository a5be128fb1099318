"""Every option of a generation, with its default and its range."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import mlx.core as mx

from ..errors import OptionError
from ..spec import plain_number
from ..text import parameter_schemas, token_ids
from .penalties import Processor, checked, make_processors
from .sampling import Sampler, make_sampler

NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
# What `Tokenizer.render_chat` takes by other ways.
RESERVED = ("self", "messages", "tools")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _are_processors(value: Any) -> bool:
    return isinstance(value, Sequence) and all(map(callable, value))


def _are_tools(value: Any) -> bool:
    """Whether what is read of tools is there to be read."""
    try:
        return value is None or (
            isinstance(value, Sequence) and all(map(_is_mapping, parameter_schemas(value).values()))
        )
    except (AttributeError, TypeError):
        return False


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def _are_variables(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) and name not in RESERVED for name in value)


WANTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(NUMBERS, (_is_number, "a number")),
    "max_tokens": (_is_count, "an integer of at least 1"),
    "logit_bias": (_is_mapping, "a dict of numbers by token id"),
    "processors": (_are_processors, "a list of functions of tokens and logits, which return logits"),
    "stop": (lambda value: isinstance(value, Collection), "a string or strings"),
    "tools": (_are_tools, "a list of dicts, each the JSON schema of a function, or None"),
    "template": (
        _are_variables,
        f"a dict of the chat template's variables, none of them called {' or '.join(RESERVED)}",
    ),
    "wait": (lambda value: value is None or (_is_number(value) and value >= 0), "seconds, at least 0, or None"),
    "on_prefill": (lambda value: value is None or callable(value), "a function of done and total, or None"),
}


@dataclass(frozen=True)
class GenerationOptions:
    """How text is sampled and when it ends.

    temperature 0 is greedy; a seed of None picks one. top_k cuts before top_p. `processors` are called with the tokens
    so far and the f32 logits [vocab], and return logits. `stop` are strings, special tokens among them; the text before
    the first of them is returned. ignore_eos: exactly max_tokens tokens. `force` are token ids to take in place of
    sampled ones, one a step and exactly those (teacher forcing). logprobs: the natural log p of each token, after the
    processors. `template` are variables of the chat template, such as enable_thinking. on_prefill(done, total) is
    called as the prompt is read. `processors` and on_prefill run in the thread that asks for the text. wait: seconds to
    wait for a turn where others use the model, then a BusyError; None: as long as it takes.
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
    wait: float | None = None

    def __post_init__(self) -> None:
        given = {f.name: plain_number(getattr(self, f.name)) for f in fields(self)}
        for name, (fits, wanted) in WANTED.items():
            if not fits(given[name]):
                raise OptionError(f"{name} is {given[name]!r}; it must be {wanted}.")
        given["force"] = tuple(token_ids(self.force, "force", "token ids, integers in a list"))
        given["logit_bias"] = {plain_number(i): plain_number(bias) for i, bias in self.logit_bias.items()}
        for name, value in given.items():
            object.__setattr__(self, name, value)

    def sampler(self) -> Sampler:
        """The sampler these options ask for. OptionError for a number out of range."""
        if self.force:
            forced = iter(self.force)
            return lambda logits: mx.array(next(forced))
        return make_sampler(self.temperature, self.top_k, self.top_p, self.min_p, self.seed)

    def penalties(self, prompt_length: int) -> list[Processor]:
        """What comes before `processors`: penalties and bias."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty, self.logit_bias)
        return make_processors(*penalties, prompt_length)

    def processed(self, tokens: Sequence[int], logits: mx.array) -> mx.array:
        """What `processors` make of logits f32 [vocab], evaluated."""
        for processor in map(checked, self.processors):
            logits = processor(tokens, logits)
        mx.eval(logits)
        return logits

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
