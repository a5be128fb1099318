"""Figures that a document quotes from RESULTS.json: each has a comment behind it that names it.

`1.26<!-- decode/decode.vs_llama_cpp -->` quotes a median, `3<!-- decode/decode.vs_llama_cpp rounds -->` its rounds,
`85%<!-- conversion/conversion.fraction_of_slower -->` a share. A figure keeps the decimals that it has.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from benchmarks.record import Entry

QUOTE = re.compile(
    r"(?P<number>\d[\d,]*(?:\.\d+)?)(?P<percent>%?)<!-- (?P<benchmark>\w+)/(?P<name>[\w.]+)(?P<rounds> rounds)? -->"
)


@dataclass(frozen=True)
class Quote:
    """A figure as it is written, and where it is from."""

    written: str
    benchmark: str
    name: str
    rounds: bool
    percent: bool

    def right(self, results: dict[str, Entry]) -> str:
        """As RESULTS.json has it, rounded as it is written. KeyError if it has none."""
        figure = results[self.benchmark]["results"][self.name]
        if self.rounds:
            return str(figure["rounds"])
        places = len(self.written.partition(".")[2])
        return f"{figure['median'] * (100 if self.percent else 1):,.{places}f}"


def _quote(match: re.Match[str]) -> Quote:
    return Quote(match["number"], match["benchmark"], match["name"], bool(match["rounds"]), bool(match["percent"]))


def quotes(text: str) -> list[Quote]:
    return [_quote(match) for match in QUOTE.finditer(text)]


def without_quotes(text: str) -> str:
    """`text` less its quoted figures, to find those that name no source."""
    return QUOTE.sub("", text)


def requoted(text: str, results: dict[str, Entry]) -> str:
    """`text` with every quoted figure as RESULTS.json has it now."""
    return QUOTE.sub(lambda match: match[0].replace(match["number"], _quote(match).right(results), 1), text)
