"""What the documents hold: their code blocks, the flags they name, the figures they state."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("examples/*.md"), *ROOT.glob("benchmarks/*.md")])
FENCE = re.compile(r"(?:<!-- not run: (?P<reason>.+?) -->\n)?```(?P<language>\w+)\n(?P<text>.*?)^```$", re.M | re.S)
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
NAME = re.compile(r"(?<![\w./])mlx_ttd(?:\.[A-Za-z_]\w*)+")
UNIT = r"tok/s|tokens/s|[KMG]B/s|bits per byte|bits/byte|%|x\b|×|times\b|ms|µs|us\b|s\b"
FIGURE = re.compile(rf"(?<![\w.,])(?P<number>\d[\d,]*(?:\.\d+)?)\s?(?P<unit>{UNIT})")


@dataclass(frozen=True)
class Block:
    document: str
    language: str
    text: str
    line: int
    reason: str | None

    @property
    def name(self) -> str:
        return f"{self.document}:{self.line}"


def blocks(language: str) -> list[Block]:
    """The fenced blocks of one language in every document; `<!-- not run: why -->` above one gives its reason."""
    found = []
    for path in DOCUMENTS:
        text = path.read_text()
        for match in FENCE.finditer(text):
            line = text.count("\n", 0, match.start("text"))
            block = Block(path.relative_to(ROOT).as_posix(), match["language"], match["text"], line, match["reason"])
            found.append(block)
    return [block for block in found if block.language == language]


def docstrings(path: Path) -> list[str]:
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, owners))
    return [text for node in nodes if (text := ast.get_docstring(node))]


def flags_named() -> dict[str, set[str]]:
    """Each --flag that a document or a docstring names, with the files that name it."""
    named: dict[str, set[str]] = {}
    sources = [path for folder in ("mlx_ttd", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")]
    texts = [(path, path.read_text()) for path in DOCUMENTS]
    texts += [(path, text) for path in sources for text in docstrings(path)]
    for path, text in texts:
        for flag in FLAG.findall(text):
            named.setdefault(flag, set()).add(path.relative_to(ROOT).as_posix())
    return named


def names_given() -> set[str]:
    """Each dotted name of the package that a document gives."""
    return {name for path in DOCUMENTS for name in NAME.findall(path.read_text())}


def flags_of_scripts() -> set[str]:
    """The flags that benchmarks, examples and the fuzzer define with argparse."""
    found = set()
    for path in [*ROOT.glob("benchmarks/*.py"), *ROOT.glob("examples/*.py"), ROOT / "tests/fuzz.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
                found |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
    return found


def figures(text: str) -> list[tuple[str, str]]:
    """(number, unit) of each measured figure: speeds, shares, ratios, times, bits per byte. Sizes are settings."""
    return [(match["number"].replace(",", ""), match["unit"]) for match in FIGURE.finditer(text)]
