"""What a model did and holds, as numbers, as JSON and as a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from .observe import Counters
from .options import Options
from .streaming import Division, show_size

SCHEMA = 1


@dataclass(frozen=True)
class Stats:
    """What a model did since it was loaded or last reset, what it holds, and with which options and kernels it runs.

    options: the effective ones. kernels: the implementation that ran, by operation, "native", "gpu" or "reference".
    load_seconds; first_token_seconds: from the last call to its first token, None before one; both without the time
    that kernels took to be compiled or loaded, which is compile_seconds, the process's so far, None where none was.
    peak_bytes: peak resident set of the process.
    """

    counters: Counters
    options: Options
    division: Division
    kernels: Mapping[str, str]
    load_seconds: float
    first_token_seconds: float | None
    compile_seconds: float | None
    peak_bytes: int

    @property
    def hit_rate(self) -> float | None:
        """Share of expert requests that were in memory; None before the first."""
        return self.counters.hits / self.counters.requests if self.counters.requests else None

    def to_json(self) -> dict[str, Any]:
        """Schema version and every figure, ready for json.dumps: names end in their units, counts have none."""
        return {"schema": SCHEMA} | asdict(self) | {"hit_rate": self.hit_rate}

    def rows(self) -> dict[str, str]:
        """The figures that a person asks for first, written out."""
        counts, first = self.counters, self.first_token_seconds
        found = {
            "tokens": f"{counts.prefill_tokens:,} read, {counts.decode_steps:,} steps",
            "budget": f"{show_size(self.division.total)}, peak {show_size(self.peak_bytes)} of the process",
            "load": f"{self.load_seconds:.2f} s",
        }
        if first is not None:
            found["first token"] = f"{first:.2f} s"
        if self.compile_seconds is not None:
            found["compiling"] = f"{self.compile_seconds:.2f} s"
        if self.hit_rate is not None:
            found["experts in memory"] = f"{counts.hits:,} of {counts.requests:,} requests ({self.hit_rate:.0%})"
            found["experts read"] = show_size(counts.bytes_read)
        return found

    def __str__(self) -> str:
        return "\n".join(f"{name}: {text}" for name, text in self.rows().items())

    def _repr_html_(self) -> str:
        return html_table(self.rows())


def html_table(rows: Mapping[str, str]) -> str:
    """A table of two columns, as a notebook shows it."""
    lines = (f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in rows.items())
    return f"<table>{''.join(lines)}</table>"
