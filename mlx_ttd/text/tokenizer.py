"""A model's tokenizer, loaded from its directory when text is first needed."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, OptionError, TokenizerError
from ..spec import read_json, read_small, require_regular, user_path
from .chat_template import read_templates, render
from .detokenizer import Detokenizer
from .fewest_tokens import FewestTokens

if TYPE_CHECKING:
    import tokenizers

TOKENIZER_BYTES = 256 << 20
CONFIG_BYTES = 16 << 20
# Of a text that is cut into tokens whatever their number, in some 25 MB at most.
SHORT_TEXT = 1 << 16


class Tokenizer:
    """The tokenizer.json, tokenizer_config.json and chat templates of `directory`, read when first asked for.

    TokenizerError when a file is missing or malformed. From `bos_token` on, it has the names by which mlx-lm and other
    programs made for transformers use one: `mlx_lm.generate(llm.model, llm.tokenizer, ...)`.
    """

    def __init__(self, directory: str | Path):
        self.directory = user_path(directory)

    def __repr__(self) -> str:
        return f"Tokenizer({str(self.directory)!r})"

    @cached_property
    def _backend(self) -> tokenizers.Tokenizer:
        path = self.directory / "tokenizer.json"
        hint = "copy the model's tokenizer.json there, or pass token ids instead of text"
        try:
            text = read_small(path, TOKENIZER_BYTES, TokenizerError, hint).decode("utf-8")
        except ValueError as error:
            raise TokenizerError(f"{path} cannot be read: {error}.") from None
        from tokenizers import Tokenizer as Backend

        try:
            backend = Backend.from_str(text)
        except Exception as error:
            reason = str(error).rstrip(".")
            raise TokenizerError(f"{path} is not a tokenizer file: {reason}; copy it from the model again.") from None
        backend.no_padding()
        backend.no_truncation()
        return backend

    @cached_property
    def config(self) -> dict[str, Any]:
        """tokenizer_config.json, or an empty dict when the directory has none."""
        return self._json("tokenizer_config.json")

    def _json(self, name: str) -> dict[str, Any]:
        path = self.directory / name
        require_regular(path, TokenizerError)
        try:
            return read_json(path, CONFIG_BYTES) if path.exists() else {}
        except ConfigError as error:
            raise TokenizerError(str(error)) from None

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """Special tokens by their role (bos_token, eos_token, pad_token, ...), as a chat template sees them.

        special_tokens_map.json counts where tokenizer_config.json is silent.
        """
        fields = {**self._json("special_tokens_map.json"), **self.config}
        found = {name: value for name, value in fields.items() if name.endswith("_token")}
        extra = self.config.get("extra_special_tokens")
        if isinstance(extra, Mapping):
            found.update(extra)
        contents = {
            name: value.get("content") if isinstance(value, Mapping) else value for name, value in found.items()
        }
        return {name: value for name, value in contents.items() if isinstance(value, str)}

    @cached_property
    def templates(self) -> dict[str, str]:
        """The directory's chat templates by name; the only one, or the one used by default, is "default"."""
        return read_templates(self.directory, self.config)

    @cached_property
    def vocab_size(self) -> int:
        """The number of ids that have text, added tokens included; a model's vocabulary may be padded beyond it."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """The ids of `text`; a special token that `text` spells out becomes that token.

        add_special_tokens: put what the tokenizer's file says around them, such as a token that begins every text.
        """
        if not isinstance(text, str):
            raise TokenizerError(
                f"encode takes a string, not a {type(text).__name__}; pass token ids to the model itself."
            )
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError):
            raise TokenizerError(
                "The text holds a lone surrogate, which is no character; decode it as UTF-8 first."
            ) from None
        except Exception as error:
            reason = str(error).rstrip(".")
            raise TokenizerError(f"{self.directory / 'tokenizer.json'} cannot encode this text: {reason}.") from None

    @cached_property
    def _fewest_tokens(self) -> FewestTokens:
        return FewestTokens(self._backend)

    def fewest_tokens(self, text: str) -> int:
        """At least so many ids `encode` makes of a long text, told without making them; 0 where it cannot be told."""
        return self._fewest_tokens(text) if len(text) > SHORT_TEXT else 0

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD, ids without text become nothing."""
        try:
            return self._backend.decode([operator.index(i) for i in ids], skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError) as error:
            raise TokenizerError(f"decode takes token ids, integers of at least 0: {error}.") from None

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """A decoder for one generation's tokens, one at a time."""
        return Detokenizer(lambda ids: self.decode(ids, skip_special_tokens))

    def token_id(self, token: str) -> int | None:
        """The id of exactly this token, or None when the vocabulary lacks it."""
        try:
            return self._backend.token_to_id(token)
        except UnicodeEncodeError:
            return None

    def special_id(self, token: str) -> int | None:
        """As `token_id`, of a special token alone: one that a generation's text leaves out."""
        found = self.token_id(token)
        return found if found is not None and not self.decode([found], skip_special_tokens=True) else None

    def token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of an id, or None when it has none."""
        try:
            return self._backend.id_to_token(token_id)
        except OverflowError:
            return None

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """The id of tokenizer_config's eos_token, if it names one."""
        token = self.special_tokens.get("eos_token")
        found = None if token is None else self.token_id(token)
        return frozenset() if found is None else frozenset({found})

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template: str | None = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """The prompt that the model's chat template makes of `messages`.

        template, or chat_template as transformers calls it: a name among `templates`, or a template's own text; by
        default "tool_use" with tools where there is one, else "default". variables: whatever the template reads, such
        as enable_thinking=False. TemplateError when there is none, when it raises, or when it exceeds its limits.
        """
        return render(
            self.templates,
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            template=chat_template if template is None else template,
            variables={**self.special_tokens, **variables},
        )

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """The ids of `render_chat(messages, **options)`."""
        return self.encode(self.render_chat(messages, **options))

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens.get("eos_token")

    @property
    def eos_token_id(self) -> int | None:
        return next(iter(self.eos_ids), None)

    @property
    def chat_template(self) -> str | None:
        return self.templates.get("default")

    @property
    def name_or_path(self) -> str:
        return str(self.directory)

    def get_vocab(self) -> dict[str, int]:
        return self._backend.get_vocab(with_added_tokens=True)

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        return self.token_id(tokens) if isinstance(tokens, str) else [self.token_id(token) for token in tokens]

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        return self.token(ids) if isinstance(ids, int) else [self.token(i) for i in ids]

    def batch_decode(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = False) -> Any:
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> Any:
        """As `render_chat`, or with tokenize `encode_chat`. OptionError for what neither does."""
        for name in ("continue_final_message", "return_dict", "return_tensors"):
            if variables.pop(name, None):
                raise OptionError(f"apply_chat_template has no {name}; leave it out, or use transformers' tokenizer.")
        make = self.encode_chat if tokenize else self.render_chat
        return make(
            conversation,
            tools=tools,
            documents=documents,
            template=chat_template,
            add_generation_prompt=add_generation_prompt,
            **variables,
        )
