"""Prompts in any form, text, chat messages or token ids, as the token ids that a model reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from .errors import OptionError
from .streaming import require_in_vocabulary
from .text import Tokenizer, token_ids

Messages = Sequence[Mapping[str, Any]]
Prompt = str | Sequence[int] | Messages
PROMPT = "a text, a list of chat messages, or token ids: integers in a list or in an array of one dimension"


def is_chat(prompt: Prompt) -> TypeGuard[Messages]:
    """Whether a prompt is a list of chat messages."""
    listed = isinstance(prompt, Sequence) and not isinstance(prompt, str)
    return listed and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def ids_of(
    tokenizer: Tokenizer, prompt: Prompt, tools: Any, template: Mapping[str, Any], admit: Callable[[str], None]
) -> Sequence[int]:
    """Token ids of a prompt: text as it is, chat messages through the template, ids as they are.

    admit: called with a text before it is cut into tokens; it may raise.
    """
    if is_chat(prompt):
        prompt = tokenizer.render_chat(prompt, tools=tools, **template)
    if isinstance(prompt, str):
        admit(prompt)
        return tokenizer.encode(prompt)
    return prompt  # type: ignore[return-value]


def ids_after(
    tokenizer: Tokenizer, prompt: Prompt, continuation: str | Sequence[int], admit: Callable[[str], None]
) -> tuple[Prompt, Sequence[int]]:
    """A prompt, and the ids of what follows it. Two texts are tokenised in one piece and cut where lm-eval cuts them.

    That is before the spaces that end the first: models have read " word" as one token, and hardly " " before "word".
    Where tokens cross the cut each text is tokenised by itself, since the halves of a cut token spell other texts.
    admit: as in `ids_of`.
    """
    if not isinstance(continuation, str) or not continuation:
        return prompt, continuation or []
    if isinstance(prompt, str):
        admit(prompt + continuation)
        whole = tokenizer.encode(prompt + continuation)
        for context in filter(None, (prompt.rstrip(), prompt)):
            before = tokenizer.encode(context)
            after = whole[len(before) :]
            if after and tokenizer.decode([*before, *after]) == tokenizer.decode(whole):
                return before, after
    admit(continuation)
    return prompt, tokenizer.encode(continuation)


def continued(
    tokenizer: Tokenizer, rendered: str, written: Sequence[int], stops: frozenset[int], marked: int = 0
) -> list[int]:
    """Ids of a rendered chat. Where it repeats the tokens `written` and then ends their turn, those stay as they are;
    else the first `marked` of them do, where it repeats these.

    A model may write a text in other tokens than the tokenizer would: read anew, that text would match no state.
    """
    if written and written[-1] in stops:
        written = written[:-1]
    known = tokenizer.decode(written)
    rest = rendered[len(known) :] if written and rendered.startswith(known) else ""
    ends = tuple(token for i in stops if (token := tokenizer.token(i)))
    if ends and rest.startswith(ends):
        return [*written, *tokenizer.encode(rest)]
    fresh = tokenizer.encode(rendered)
    prefix = list(written[:marked])
    if fresh[:marked] != prefix and rendered.startswith(known := tokenizer.decode(prefix)):
        return [*prefix, *tokenizer.encode(rendered[len(known) :])]
    return fresh


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt as far as it can be worked out before its turn, and what its answer is read by.

    tokens: its ids, () for a chat, which is kept `rendered`, and up to its last question, "" where that cannot be told.
    """

    tokenizer: Tokenizer | None
    ends: frozenset[int]
    tokens: Sequence[int] = ()
    rendered: str | None = None
    question: str = ""

    @property
    def chat(self) -> bool:
        return self.rendered is not None

    def ids_after(self, written: Sequence[int], marked: int) -> tuple[Sequence[int], int]:
        """The ids where the live tokens are `written`, which a chat may go on from, and how many to mark, 0 for none.

        What is marked is what a chat's next turn begins with, whatever the answer: a template that drops old reasoning
        repeats all up to the user's question, but not the answer.
        """
        if self.rendered is None or self.tokenizer is None:
            return self.tokens, 0
        ids = continued(self.tokenizer, self.rendered, written, self.ends, marked)
        if not self.question or not self.rendered.startswith(self.question):
            return ids, 0
        begun = self.tokenizer.encode(self.rendered[len(self.question) :])
        return ids, len(ids) - len(begun) if begun and list(ids[-len(begun) :]) == begun else 0


def prepare(
    tokenizer: Tokenizer,
    ends: frozenset[int],
    prompt: Messages,
    template: Mapping[str, Any],
    marks: bool,
    admit: Callable[[str], None],
) -> PreparedPrompt:
    """A chat, rendered. marks: whether its last question is to be found. admit: as in `ids_of`."""
    rendered = tokenizer.render_chat(prompt, **template)
    admit(rendered)
    question = ""
    if marks and prompt[-1].get("role") == "user":
        question = tokenizer.render_chat(prompt, **{**template, "add_generation_prompt": False})
    return PreparedPrompt(tokenizer, ends, rendered=rendered, question=question)


def check_ids(ids: Sequence[int], vocab: int) -> list[int]:
    """`ids` as integers. OptionError where there is none, or one outside the vocabulary."""
    found = token_ids(ids, "the prompt", PROMPT)
    if not found:
        raise OptionError("the prompt is empty; give at least one token.")
    require_in_vocabulary(found, vocab)
    return found
