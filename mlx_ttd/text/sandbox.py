"""Jinja for templates that nobody has vouched for: no access to Python, bounded text and bounded time.

Imported only when a template is rendered, since it needs jinja2.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import lru_cache, wraps
from inspect import signature
from types import BuiltinMethodType, CodeType
from typing import Any

from jinja2.exceptions import TemplateError as JinjaError
from jinja2.ext import loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import pass_context

from ..errors import TemplateError
from .limits import Limits
from .template_syntax import Generation, Metering

TEMPLATE_CHARACTERS = 1_000_000
INTEGER_BITS = 4096
WIDTH = 1000
NODE_CHARACTERS = 32
WIDE_FORMAT = re.compile(r"%[^%a-zA-Z]*(?:\d{4}|\*)|\{[^{}]*(?:\d{4}|\{)")
PADDING_METHODS = {"center", "encode", "expandtabs", "format_map", "ljust", "maketrans", "rjust", "translate", "zfill"}
PADDING_FILTERS = {"batch", "center", "pprint", "slice", "urlize", "wordwrap", "xmlattr"}
SEQUENCE_FILTERS = (
    {"attr", "count", "d", "default", "dictsort", "first", "groupby", "items", "last", "length", "list", "map", "max"}
    | {"min", "random", "reject", "rejectattr", "reverse", "select", "selectattr", "sort", "sum", "unique"}
)  # fmt: skip


class Sandbox(ImmutableSandboxedEnvironment):
    """An environment for one rendering, with what transformers gives to chat templates."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, limits: Limits):
        self._limits = limits
        self._deadline = time.monotonic() + limits.seconds
        self._printed = 0
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[Generation, loopcontrols],
            optimized=False,
            finalize=self._print,
        )
        self.globals.update(
            raise_exception=raise_exception, strftime_now=strftime_now, dict=lambda *a, **k: dict(*a, **k)
        )
        del self.globals["lipsum"]
        found = {**self.filters, "tojson": to_json}
        self.filters = {name: self._metered(name, found[name]) for name in found.keys() - PADDING_FILTERS}

    def tick(self) -> None:
        """Raise when the time is up."""
        if time.monotonic() > self._deadline:
            raise TemplateError(
                f"The chat template ran for more than {self._limits.seconds:g} s; pass another template."
            )

    def concatenate(self, *values: Any) -> str:
        """`a ~ b`."""
        self._check(self._size(*values))
        return "".join(map(str, values))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return super().is_safe_attribute(obj, attr, value) and not (isinstance(obj, str) and attr in PADDING_METHODS)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.tick()
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > INTEGER_BITS:
                raise TemplateError(f"The chat template makes a number of more than {INTEGER_BITS} bits.")
        elif operator == "*":
            self._check(repeated(left, right) + repeated(right, left))
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            self._check(len(left) + len(right))
        elif operator == "%" and isinstance(left, str):
            self._check_format(left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.tick()
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str) and isinstance(function, BuiltinMethodType):
            args = self._check_growth(function.__name__, owner, args)
        elif getattr(function, "__name__", "") == "format" and isinstance(
            getattr(function, "__wrapped__", None), BuiltinMethodType
        ):
            self._check_format(function.__wrapped__.__self__, *args, *kwargs.values())
        return super().call(context, function, *args, **kwargs)

    def _metered(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        takes_context = hasattr(function, "jinja_pass_arg")

        @wraps(function)
        def filtered(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            if name in ("join", "replace"):
                bound = signature(function).bind(*args, **kwargs)
                bound.apply_defaults()
                args, kwargs = bound.args, bound.kwargs
            if name not in SEQUENCE_FILTERS:
                own, (value, *rest) = args[:takes_context], args[takes_context:]
                self._check(self._size(value, *rest, *kwargs.values()))
                if name == "indent" and any(isinstance(a, int) and a > WIDTH for a in (*rest, *kwargs.values())):
                    raise TemplateError("The chat template indents too far.")
                if name == "format":
                    self._check_format(str(value), *rest, *kwargs.values())
                if name == "replace":
                    self._check_growth(name, str(value), tuple(rest))
                if name == "join":
                    value, *_ = self._check_growth(name, str(rest[0]), (value,))
                args = (*own, value, *rest)
            return function(*args, **kwargs)

        return filtered

    def _check_growth(self, method: str, text: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Refuse str methods whose result would be far larger than their arguments; iterators come back as lists."""
        if method == "join" and args:
            items = args[0] if isinstance(args[0], str) else list(args[0])
            self._check(self._size(items) + len(text) * len(items))
            return (items, *args[1:])
        if method == "replace" and len(args) >= 2:
            old, new = str(args[0]), str(args[1])
            self._check(len(text) + text.count(old) * len(new))
        return args

    def _check_format(self, text: str, *args: Any) -> None:
        if WIDE_FORMAT.search(text):
            raise TemplateError("The chat template uses a format wider than 999 characters.")
        self._check(len(text) + (text.count("%") + text.count("{")) * self._size(*args))

    # A finalize function that takes the context is never called at compile time, where it would count only once.
    @pass_context
    def _print(self, context: Context, value: Any) -> Any:
        self.tick()
        self._printed += self._size(value)
        self._check(self._printed)
        return value

    def _check(self, characters: int) -> None:
        if characters > self._limits.characters:
            raise TemplateError(f"The chat template makes more than {self._limits.characters:,} characters of text.")

    def _size(self, *values: Any) -> int:
        """About how many characters the values print as; a list inside itself many times counts each time."""
        total, stack = 0, list(values)
        while stack:
            value = stack.pop()
            total += len(value) if isinstance(value, str) else NODE_CHARACTERS
            if isinstance(value, list | tuple):
                stack += value
            elif isinstance(value, Mapping):
                stack += [*value.keys(), *value.values()]
            self._check(total + len(stack))
        return total


def repeated(sequence: Any, times: Any) -> int:
    return len(sequence) * times if hasattr(sequence, "__len__") and isinstance(times, int) else 0


def raise_exception(message: str) -> None:
    raise JinjaError(message)


def strftime_now(layout: str) -> str:
    if len(layout) > WIDTH or WIDE_FORMAT.search(layout):
        raise TemplateError("The chat template uses a date format that is too long.")
    return datetime.now().strftime(layout)


def to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Plain JSON; Jinja's own filter would escape it for HTML."""
    if isinstance(indent, str) or (indent or 0) > WIDTH:
        raise TemplateError("The chat template indents too far.")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=8)
def compiled(text: str, limits: Limits) -> CodeType:
    sandbox = Sandbox(limits)
    return sandbox.compile(Metering().visit(sandbox.parse(text)))


def run_template(text: str, values: Mapping[str, Any], limits: Limits) -> str:
    """Render `text`; any failure becomes one TemplateError that names the line."""
    if len(text) > TEMPLATE_CHARACTERS:
        raise TemplateError(
            f"The chat template is longer than {TEMPLATE_CHARACTERS:,} characters; pass another template."
        )
    try:
        code, sandbox = compiled(text, limits), Sandbox(limits)
        return sandbox.template_class.from_code(sandbox, code, sandbox.make_globals(None)).render(values)
    except TemplateError:
        raise
    except (Exception, MemoryError) as error:
        line = f" (line {found})" if (found := getattr(error, "lineno", None)) else ""
        reason = " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
        raise TemplateError(
            f"The chat template failed{line}: {reason}; change the messages or pass another template."
        ) from None
