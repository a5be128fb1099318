"""A conversation as the prompt that a model was trained on, through its Jinja chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError, TemplateError
from ..spec import read_json, read_small, require_regular
from .attachments import require_text
from .limits import DEFAULT_LIMITS, Limits
from .template_rendering import run_template

TEMPLATE_BYTES = 1 << 20
DEPTH = 200
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
DEFAULT, ADDITIONAL = "default", "additional_chat_templates"


def read_templates(directory: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates by name, a single one as "default"; empty when the model has none.

    They are chat_template.jinja and additional_chat_templates/*.jinja, or stand in tokenizer_config.json, or else in
    chat_template.json. A chat_template.jinja puts all but the additional ones out of use, as in transformers.
    """
    files = {path.stem: _read(path) for path in sorted(directory.glob(f"{ADDITIONAL}/*.jinja"))}
    single, legacy = directory / "chat_template.jinja", directory / "chat_template.json"
    for path in (single, legacy):
        require_regular(path, TemplateError)
    if single.is_file():
        return {**files, DEFAULT: _read(single)}
    listed = _named(tokenizer_config.get("chat_template"), directory / "tokenizer_config.json")
    if not listed and legacy.is_file():
        try:
            listed = _named(read_json(legacy).get("chat_template"), legacy)
        except ConfigError as error:
            raise TemplateError(str(error)) from None
    return {**listed, **files}


def _named(listed: Any, where: Path) -> dict[str, str]:
    """The templates of a chat_template field by name: one text, a list of named ones, or a dict of texts."""
    if listed is None:
        return {}
    if isinstance(listed, str):
        return {DEFAULT: listed}
    try:
        found = dict(listed) if isinstance(listed, dict) else {entry["name"]: entry["template"] for entry in listed}
    except (TypeError, KeyError):
        raise TemplateError(f'{where}: chat_template must be a string or a list of {{"name", "template"}}.') from None
    if not all(isinstance(text, str) for pair in found.items() for text in pair):
        raise TemplateError(f"{where}: chat_template has a name or a template that is not a string.")
    return found


def _read(path: Path) -> str:
    try:
        return read_small(path, TEMPLATE_BYTES, TemplateError, "copy it from the model again").decode("utf-8")
    except ValueError as error:
        raise TemplateError(f"{path} cannot be read: {error}.") from None


def choose_template(templates: Mapping[str, str], name: str | None, has_tools: bool) -> str:
    """The template called `name`, or `name` itself as a template; by default "tool_use" with tools, else "default"."""
    if name is not None and name not in templates:
        if "{" in name:
            return name
        known = ", ".join(sorted(templates)) or "none"
        raise TemplateError(f"There is no chat template named {name!r}; this model has {known}.")
    if name is None:
        name = "tool_use" if has_tools and "tool_use" in templates else DEFAULT
    if name in templates:
        return templates[name]
    if templates:
        raise TemplateError(f"The model has no default chat template; name one of {', '.join(sorted(templates))}.")
    raise TemplateError("The model has no chat template; pass the prompt as a string, or pass template=.")


def plain(value: Any, where: str, depth: int = 0) -> Any:
    """A copy of `value` made of JSON types only, since a template may call the methods of any other."""
    if depth > DEPTH:
        raise TemplateError(f"{where} is nested more than {DEPTH} deep; a chat template takes less.")
    if isinstance(value, Mapping):
        return {plain_scalar(key, where): plain(item, where, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, where, depth + 1) for item in value]
    if isinstance(value, str | int | float | None):
        return plain_scalar(value, where)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name), where, depth + 1) for field in fields(value)}
    if callable(dump := getattr(value, "model_dump", None)):
        return plain(dump(), where, depth + 1)
    return plain_scalar(value, where)


def plain_scalar(value: Any, where: str) -> Any:
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise TemplateError(
        f"{where} holds a {type(value).__name__}; a chat template takes text, numbers, lists and dicts."
    )


def normalise_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of the messages as templates want them: no None, text in one piece, call arguments as dicts."""
    if isinstance(messages, str | Mapping) or not messages:
        raise TemplateError(
            'The conversation must be a list of at least one message, {"role": "user", "content": "..."}.'
        )
    found = []
    for i, message in enumerate(plain(list(messages), "The conversation")):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise TemplateError(f'Message {i} is not a dict with a "role", as in {{"role": "user", "content": "..."}}.')
        message = {key: value for key, value in message.items() if value is not None}
        require_text(message, i)
        reasoning = next((message[name] for name in REASONING_FIELDS if name in message), None)
        if reasoning is not None:
            message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        if "content" in message:
            message["content"] = _content(message["content"], f"Message {i}")
        _parse_calls(message.get("tool_calls") or [], f"Message {i}")
        found.append(message)
    return found


def _content(content: Any, where: str) -> Any:
    """A message's content, text parts joined: a template that knows no parts would leave them out."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise TemplateError(
            f"{where} has a content of type {type(content).__name__}; "
            'pass a text, or parts, {"type": "text", "text": "..."}.'
        )
    texts = [part.get("text") for part in content if part.get("type", "text") == "text"]
    return "".join(texts) if len(texts) == len(content) and all(isinstance(text, str) for text in texts) else content


def _parse_calls(calls: Any, where: str) -> None:
    """Make the arguments of tool calls dicts, in place: OpenAI clients send them as JSON, and none as null or ""."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise TemplateError(f'{where}: tool_calls must be a list of dicts, {{"function": {{"name", "arguments"}}}}.')
    for call in calls:
        function = call["function"] if isinstance(call.get("function"), dict) else call
        given = function.get("arguments")
        try:
            arguments = json.loads(given or "{}") if isinstance(given, str) else given
        except (ValueError, RecursionError):
            arguments = given
        if arguments is not None and not isinstance(arguments, dict):
            form = "no JSON" if isinstance(arguments, str) else f"of type {type(arguments).__name__}"
            raise TemplateError(
                f"{where}: the arguments of its call of {function.get('name')!r} are {form}; "
                "pass a dict, its JSON, or null for none."
            )
        function["arguments"] = arguments or {}


def render(
    templates: Mapping[str, str],
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    template: str | None = None,
    variables: Mapping[str, Any] | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> str:
    """The text that the chosen template makes of `messages`; TemplateError when it raises or exceeds its limits."""
    text = choose_template(templates, template, bool(tools))
    values = {
        **{name: plain(value, f"The template variable {name}") for name, value in (variables or {}).items()},
        "messages": normalise_messages(messages),
        "tools": plain(tools, "tools"),
        "documents": plain(documents, "documents"),
        "add_generation_prompt": plain(add_generation_prompt, "add_generation_prompt"),
    }
    return run_template(text, values, limits)
