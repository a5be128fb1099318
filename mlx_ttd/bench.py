"""How fast a store is on this machine, as a block to paste, with what `plan` had forecast beside it."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from typing import Any

import numpy as np

from ._version import __version__
from .api import load
from .observe import MachineState, Profile, machine_state, probing
from .plan import Forecast, forecast
from .probe_machine import probe
from .streaming import parse_size, show_size

PROMPTS = (16, 128, 512)
PROFILED = 4


@dataclass(frozen=True)
class BenchReport:
    """Measured and forecast. decode_tok_s, first_token_seconds: by length of the prompt, of random tokens.

    hit_rate, bytes_per_token, disk_gb_s: of decoding at the longest; disk_gb_s over the time with a read in flight.
    phases: share of a profiled decode step. cache: what is known of the page cache, "passed by" by direct reads or
    "on, what it held is unknown".
    """

    store: str
    options: dict[str, Any]
    kernels: dict[str, str]
    slots: int
    decode_tok_s: dict[int, float]
    first_token_seconds: dict[int, float]
    hit_rate: float | None
    bytes_per_token: float
    disk_gb_s: float
    phases: dict[str, float]
    peak_bytes: int
    digest: str
    cache: str
    forecast: Forecast
    before: MachineState
    after: MachineState

    def to_json(self) -> dict[str, Any]:
        """Every figure, ready for json.dumps."""
        return asdict(self)

    def __str__(self) -> str:
        def state(found: MachineState) -> str:
            return (
                f"load {found.load:.2f}, swap {show_size(found.swap_bytes)}, {found.page_outs:,} page-outs, "
                f"{show_size(found.free_disk_bytes)} of disk free"
            )

        told, hit = self.forecast, "none" if self.hit_rate is None else f"{self.hit_rate:.0%}"
        longest = max(self.decode_tok_s)
        rows = {
            "machine": f"{platform.system()} {platform.release()} {platform.machine()}, {os.cpu_count()} cores",
            "versions": f"mlx_ttd {__version__}, mlx {version('mlx')}, python {platform.python_version()}",
            "before": state(self.before),
            "after": state(self.after),
            "options": ", ".join(f"{name}={value}" for name, value in self.options.items()),
            "kernels": ", ".join(f"{name} {kind}" for name, kind in self.kernels.items()),
            "page cache": self.cache,
            "decode": ", ".join(f"{rate:.2f} tok/s after {n}" for n, rate in self.decode_tok_s.items())
            + f"; {told.tok_s:.2f} forecast",
            "first token": ", ".join(f"{spent:.2f} s after {n}" for n, spent in self.first_token_seconds.items())
            + f"; {told.first_token_seconds:.2f} s forecast after {told.prompt_tokens}",
            "experts": f"{self.slots} slots a layer, {hit} of requests in memory; {told.hit_rate:.0%} forecast",
            "reads": f"{show_size(self.bytes_per_token)} a token at {self.disk_gb_s:.2f} GB/s; "
            f"{show_size(told.bytes_per_token)} forecast",
            "phases": ", ".join(f"{name} {share:.0%}" for name, share in self.phases.items()),
            "peak": f"{show_size(self.peak_bytes)} of the process, probe included",
            "tokens": f"digest {self.digest} at prompt {longest}",
        }
        lines = [f"{name + ':':<13}{text}" for name, text in rows.items()]
        return "\n".join([f"```\nmlx-ttd bench {self.store}, {date.today().isoformat()}", *lines, "```"])


def bench(
    store: str | os.PathLike[str],
    memory: str | int = "auto",
    tokens: int = 32,
    prompts: Sequence[int] = PROMPTS,
    **options: Any,
) -> BenchReport:
    """Decode `tokens` tokens after prompts of these lengths, greedily, then forecast the same from a probe.

    `options` are those of `load`. Prompts are random tokens of a fixed seed, so the digest is comparable.
    """
    draws = np.random.default_rng(0)
    with load(store, memory, replace=False, **{"progress": False, **options}) as llm:
        before = machine_state(llm.store.path)
        rates, firsts = {}, {}
        for length in sorted(prompts):
            ids = draws.integers(0, llm.store.spec.vocab, length).tolist()
            response = llm.generate(ids, max_tokens=1, temperature=0.0, ignore_eos=True)
            firsts[length] = response.first_token_seconds
            counted = llm.counters.copy()
            ids += response.tokens
            response = llm.generate(ids, max_tokens=tokens, temperature=0.0, ignore_eos=True)
            rates[length] = tokens / sum(response.step_seconds)
        counts = llm.counters.since(counted)
        profile = Profile()
        with probing(profile):
            # Only the last token is new to the live sequence, so nothing is read but by decode steps.
            llm.generate([*ids, *response.tokens], max_tokens=PROFILED, temperature=0.0, ignore_eos=True)
        after, stats, opened = machine_state(llm.store.path), llm.stats(), llm.store
        total, chosen, slots = llm.division.total, llm.options, llm.division.slots
    told = forecast(opened, chosen, probe(opened), total, max(firsts))
    return BenchReport(
        store=opened.path.name,
        options={**asdict(chosen), "memory": total},
        kernels=dict(stats.kernels),
        slots=slots,
        decode_tok_s=rates,
        first_token_seconds=firsts,
        hit_rate=counts.hits / counts.requests if counts.requests else None,
        bytes_per_token=counts.bytes_read / tokens,
        disk_gb_s=counts.bytes_read / counts.read_seconds / 1e9 if counts.read_seconds else 0.0,
        phases={name: spent / profile.total for name, spent in profile.seconds.items()},
        peak_bytes=stats.peak_bytes,
        digest=response.digest,
        cache="passed by" if chosen.read_mode == "direct" else "on, what it held is unknown",
        forecast=told,
        before=before,
        after=after,
    )


def sweep(
    store: str | os.PathLike[str], low: str | int, high: str | int, points: int = 6, **options: Any
) -> dict[int, float]:
    """Decode tok/s by memory budget in bytes, at `points` budgets evenly from low to high."""
    ids = np.random.default_rng(0).integers(0, 100, 32).tolist()
    found = {}
    for memory in np.linspace(parse_size(low), parse_size(high), points).astype(int).tolist():
        with load(store, memory, replace=False, **{"progress": False, **options}) as llm:
            response = llm.generate(ids, max_tokens=32, temperature=0.0, ignore_eos=True)
            found[memory] = 16 / sum(response.step_seconds[-16:])
    return found


def draw_knee(found: dict[int, float], path: str | os.PathLike[str]) -> None:
    """Draw what `sweep` found as a PNG; needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot([memory / 1e9 for memory in found], list(found.values()), marker="o")
    axes.set_xlabel("memory budget, GB")
    axes.set_ylabel("decode, tok/s")
    axes.set_ylim(bottom=0)
    figure.savefig(path, dpi=150)
