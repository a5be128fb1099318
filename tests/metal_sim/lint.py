"""What clang lets pass but Apple's compiler refuses, and what would make a kernel's numbers depend on the compiler."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .source import KernelSource

COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
BUILT_IN = (
    r"(?:bool|half|float|bfloat|bfloat16_t|float16_t|auto|void|size_t|u?(?:char|short|int|long)|u?int\d+_t)[234]?"
)
DECLARED = re.compile(r"\b(?:struct|class|union|typename|using)\s+(\w+)")
SPACES = {"device", "constant", "threadgroup", "thread"}
WORDS = {
    "simd_sum": r"\b(?:simd|quad)_(?:sum|product|prefix_\w+)\b",
    "refused by Metal": r"\b(?:goto|register|thread_local|virtual|new|delete|typeid|dynamic_cast|try|catch|throw)\b",
    "fast maths": r"\bfast::|#pragma\s+METAL\s+fp\s+(?!contract\(off\))",
    "not spelled precise::": r"(?<!precise::)(?<![\w.])(?:exp|exp2|log|log2|pow|sin|cos|tanh|sqrt|rsqrt|divide)\s*\(",
}
ADVICE = {
    "simd_sum": "the order of its additions is Metal's secret; write a butterfly of simd_shuffle_xor",
    "refused by Metal": "the Metal language lacks it",
    "fast maths": "its roundings are the compiler's choice",
    "not spelled precise::": "functions of a float are fast ones by default",
}


def lint_text(source: KernelSource) -> list[str]:
    """One line for each thing in the header and body that should not be there."""
    types = "|".join([BUILT_IN, *dict.fromkeys(DECLARED.findall("\n".join([source.header, *source.constants])))])
    found = []
    for part, text in (("header", source.header), ("body", source.body)):
        code = COMMENT.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), text)
        for at, message in [
            *(
                (m.start(), f"{name} ({m[0].strip()}): {ADVICE[name]}")
                for name, p in WORDS.items()
                for m in re.finditer(p, code)
            ),
            *_unqualified(code, types),
            *_static_locals(code, part == "body"),
        ]:
            found.append(f"{part}:{code.count(chr(10), 0, at) + 1}: {message}")
    return found + [f"header: recursion of {name}: the Metal language lacks it" for name in _recursive(source.header)]


def _unqualified(code: str, types: str) -> Iterator[tuple[int, str]]:
    for match in re.finditer(rf"\b(?:{types})\b(?:\s*<[^<>;(){{}}]*>)?(?:\s+const)?\s*([*&])(?!&)", code):
        before = re.split(r"[;{}(),<]", code[: match.start()])[-1]
        if not SPACES & set(re.findall(r"\w+", before)):
            kind = "pointer" if match[1] == "*" else "reference"
            yield match.start(), f"unqualified {kind} ({match[0].strip()}): say device, constant, threadgroup or thread"


def _scopes(code: str) -> Iterator[tuple[int, int, str]]:
    """Start and end of each brace pair that holds statements, and the name of the function it is the body of."""
    opened: list[tuple[int, str | None]] = []
    for match in re.finditer(r"[{}]", code):
        if match[0] == "{":
            lead = re.split(r"[;{}]", code[: match.start()])[-1]
            names = re.findall(r"(\w+)\s*\(", lead)
            is_type = re.search(r"\b(?:struct|class|union|namespace|enum)\b", lead) and not names
            opened.append((match.end(), None if is_type else (names[0] if names else "")))
        elif opened:
            start, name = opened.pop()
            if name is not None:
                yield start, match.start(), name


def _static_locals(code: str, inside: bool) -> Iterator[tuple[int, str]]:
    scopes = list(_scopes(code))
    for match in re.finditer(r"\bstatic\b", code):
        if inside or any(start <= match.start() < end for start, end, _ in scopes):
            yield match.start(), "static local: the Metal language lacks it"


def _recursive(header: str) -> list[str]:
    code = COMMENT.sub(" ", header)
    bodies: dict[str, str] = {}
    for start, end, name in _scopes(code):
        if name and name not in ("if", "for", "while", "switch"):
            bodies[name] = bodies.get(name, "") + code[start:end]
    calls = {name: {other for other in bodies if re.search(rf"\b{other}\s*\(", body)} for name, body in bodies.items()}
    reached = {name: set(others) for name, others in calls.items()}
    for _ in reached:
        for others in reached.values():
            others.update(*(reached[other] for other in tuple(others)))
    return [name for name, others in reached.items() if name in others]


VALUE = re.compile(r"^  (%[\w.]+) = (?:tail )?(\w+) (.*?)(?:, !dbg !(\d+))?$")
CARRIES = {"phi", "select", "fneg", "insertelement", "extractelement", "shufflevector", "freeze", "bitcast"}


def lint_sums(ir: str) -> list[str]:
    """Where, in a kernel's LLVM code, a product flows into a sum that a compiler could fuse with it.

    mul_rn and add_rn stay apart on every backend, so what is inlined from them is passed over.
    """
    places = _Places(ir)
    found = []
    for function in re.split(r"^define ", ir, flags=re.MULTILINE)[1:]:
        values = {m[1]: m for m in map(VALUE.match, function.splitlines()) if m}
        products: set[str] = set()
        before = -1
        while len(products) != before:
            before = len(products)
            for name, value in values.items():
                product = value[2] == "fmul" and places.function(value[4]) != "mul_rn"
                if product or (value[2] in CARRIES and products & set(re.findall(r"%[\w.]+", value[3]))):
                    products.add(name)
        for value in values.values():
            sums = value[2] in ("fadd", "fsub") and places.function(value[4]) != "add_rn"
            if sums and products & set(re.findall(r"%[\w.]+", value[3])):
                found.append(f"{places.line(value[4])}: a product flows into a sum; say fma, or mul_rn and add_rn")
    return list(dict.fromkeys(found))


class _Places:
    """The debug information of LLVM code: the line and the function that an instruction was written in."""

    def __init__(self, ir: str) -> None:
        self.nodes = dict(re.findall(r"^!(\d+) = (?:distinct )?(!DI\w+\(.*\))$", ir, re.MULTILINE))

    def field(self, node: str, name: str) -> str:
        match = re.search(rf'\b{name}: (?:!|")?([\w.]+)', self.nodes.get(node, ""))
        return match[1] if match else ""

    def function(self, location: str) -> str:
        scope = self.field(location, "scope")
        while scope and "!DISubprogram" not in self.nodes.get(scope, ""):
            scope = self.field(scope, "scope")
        return self.field(scope, "name")

    def line(self, location: str) -> str:
        scope = self.field(location, "scope")
        return f"{self.field(self.field(scope, 'file'), 'filename')}:{self.field(location, 'line')}"
