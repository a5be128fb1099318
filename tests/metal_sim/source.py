"""The Metal text that MLX generates for a kernel call, taken apart and put together again for clang."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .errors import SourceError

PARAMETER = re.compile(r"(?:const )?(device|constant) ([\w<>]+)([*&]) (\w+) \[\[buffer\((\d+)\)\]\]")
ENTRY = (
    'extern "C" __attribute__((no_sanitize("thread"))) '
    "void msl_entry(thread ulong* arguments, const thread msl_thread* t)"
)
ATTRIBUTE = re.compile(r"(\w+) (\w+) \[\[(\w+)\]\]")


@dataclass(frozen=True)
class Parameter:
    """A buffer argument: its address space, element type, whether it is one value passed by reference, and its name."""

    space: str
    type: str
    reference: bool
    name: str
    written: bool


@dataclass(frozen=True)
class KernelSource:
    """One kernel as Apple's compiler would get it, in parts; `text` is the whole."""

    name: str
    text: str
    header: str
    body: str
    constants: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    attributes: tuple[tuple[str, str], ...]


def trace(kernel: Any, inputs: Sequence[mx.array], **call: Any) -> str:
    """The text MLX generates when `kernel` is called so."""
    primitives: list[list[Any]] = []

    def note(event: dict[str, Any]) -> None:
        if event["type"] == "primitive" and event["name"] == "CustomKernel":
            primitives.append(event["arguments"])

    mx.export_function(note, lambda *arrays: kernel(inputs=list(arrays), **call), *inputs)
    (arguments,) = primitives
    return arguments[1]


def take_apart(text: str) -> KernelSource:
    start = re.search(r"(?:template <([^>]*)>\n)?\[\[kernel\]\] void (\w+)\(\n(.*?)\) \{\n", text, re.DOTALL)
    if start is None:
        raise SourceError("MLX's text has no kernel signature of the known form.")
    templates, name, signature = start.groups()
    end = text.find("\ntemplate [[host_name(", start.end())
    body = text[start.end() : end if end >= 0 else len(text)].rstrip().removesuffix("}")
    constants = []
    if templates:
        values = re.search(rf"decltype\({name}<(.*?)>\)", text[end:])
        assert values is not None
        for declared, value in zip(templates.split(", "), values[1].split(", "), strict=True):
            kind, constant = declared.split(" ")
            constants.append(
                f"using {constant} = {value};" if kind == "typename" else f"constexpr {kind} {constant} = {value};"
            )
    parameters = [
        Parameter(m[1], m[2], m[3] == "&", m[4], not m[0].startswith("const")) for m in PARAMETER.finditer(signature)
    ]
    attributes = [(m[2], m[3]) for m in ATTRIBUTE.finditer(signature)]
    return KernelSource(name, text, text[: start.start()], body, tuple(constants), tuple(parameters), tuple(attributes))


def for_clang(source: KernelSource, prologue: str = "") -> str:
    """A translation unit in C++ for OpenCL whose entry `msl_entry` runs one thread."""
    signature = [
        f"{'' if p.written else 'const '}{p.space} {p.type}{'&' if p.reference else '*'} {p.name}"
        for p in source.parameters
    ]
    signature += [f"{'uint3' if is_vector(kind) else 'uint'} {name}" for name, kind in source.attributes]
    arguments = [
        f"{'*' if p.reference else ''}({'' if p.written else 'const '}{p.space} {p.type}*)arguments[{i}]"
        for i, p in enumerate(source.parameters)
    ]
    arguments += [f"t->{kind}" for _, kind in source.attributes]
    return "\n".join(
        [
            '#include "metal_stdlib"',
            prologue,
            "#pragma clang attribute push(__attribute__((always_inline)), apply_to = function)",
            '#line 1 "header"',
            source.header,
            "#pragma clang attribute pop",
            '#line 1 "constants"',
            *source.constants,
            '#line 1 "signature"',
            f"__kernel __attribute__((noinline)) void {source.name}({', '.join(signature)}) {{",
            '#line 1 "body"',
            source.body,
            "}",
            '#line 1 "entry"',
            f"{ENTRY} {{",
            f"  {source.name}({', '.join(arguments)});",
            "}\n",
        ]
    )


def is_vector(attribute: str) -> bool:
    return attribute.startswith(
        ("thread_position", "threadgroup_position", "threads_per_grid", "threadgroups_per")
    ) or (attribute in ("threads_per_threadgroup", "dispatch_threads_per_threadgroup"))
