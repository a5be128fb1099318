"""The text of a kernel from csrc/kernels, as each compiler takes it.

Metal's gets the body, and of its headers only what it uses. NVRTC can read files, so CUDA's gets their names: MLX
hashes the whole text at every launch, at several microseconds for ten kilobytes.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

NAMES = (
    r"#define (\w+)",
    r"\b(?:struct|enum class) (\w+)",
    r"\btypedef [^;]*?(\w+);",
    r"\bFN [\w ]+?(\w+)(?:<\w+>)?\(",
    r"template <> [\w ]+?(\w+)<\w+>\(",
)


@cache
def read_text(name: str) -> str:
    """A file of csrc/kernels without comments and indentation."""
    text = (files(__package__) / "texts" / name).read_text(encoding="utf-8")
    lines = (re.sub(r"\s*//.*", "", line).strip() for line in text.splitlines())
    return "".join(line + "\n" for line in lines if line)


def words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


def definitions(header: str) -> list[str]:
    """The macros, types and functions of a header, one each."""
    found, depth, current = [], 0, ""
    for line in header.splitlines(keepends=True):
        current += line
        depth += line.count("{") - line.count("}")
        if depth == 0 and (line.startswith("#") or line.rstrip().endswith((";", "}"))):
            found.append(current)
            current = ""
    return found


def including_text(name: str, headers: tuple[str, ...], inputs: tuple[str, ...]) -> tuple[str, str]:
    """Header and body of kernel `name` that include its files by their paths."""
    header = "".join(f'#include "{files(__package__) / "texts" / file}"\n' for file in headers)
    # MLX passes the shapes that it finds named.
    shapes = " ".join(f"{x}_shape" for x in inputs if f"{x}_shape" in words(read_text(f"{name}.metal")))
    return header, f'#include "{files(__package__) / "texts" / name}.metal"\n// {shapes}\n'


@cache
def kernel_text(name: str, headers: tuple[str, ...]) -> tuple[str, str]:
    """Header and body of kernel `name`. Headers define before they use, so one look from the end finds what is used."""
    body = read_text(f"{name}.metal")
    used, kept = words(body), []
    for definition in reversed(definitions("".join(read_text(header) for header in headers))):
        names = {match for pattern in NAMES for match in re.findall(pattern, definition)}
        if not names or names & used:
            kept.append(definition)
            used |= words(definition)
    return "".join(reversed(kept)), body
