"""Ways to run a store, alternated A B A B in one process, with a ratio only where they gave the same bits."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .api import load
from .errors import OptionError, TTDError
from .generation import Response
from .observe import MachineState, machine_state
from .prompts import Prompt
from .stats import Stats

SCHEMA = 1
NOISY_SPREAD = 0.25


@dataclass(frozen=True)
class Arm:
    """One way, over all its rounds. Rates are tokens a second, seconds are wall time, bytes those of expert records."""

    options: Mapping[str, Any]
    decode_rates: tuple[float, ...]
    first_token_seconds: tuple[float, ...]
    step_seconds_p50: float
    step_seconds_p95: float
    step_misses_p50: float
    step_misses_p95: float
    bytes_per_token: float
    hit_rate: float | None
    digest: str
    logits_digest: str

    @property
    def decode_rate(self) -> float:
        """Median tokens a second after the first token."""
        return statistics.median(self.decode_rates)

    @property
    def spread(self) -> float:
        """(largest - smallest) / median of the decode rates."""
        return (max(self.decode_rates) - min(self.decode_rates)) / self.decode_rate


@dataclass(frozen=True)
class Comparison:
    """Arms by name, the machine before and after, and whether it was too busy for the figures to be trusted."""

    arms: Mapping[str, Arm]
    before: MachineState
    after: MachineState

    @property
    def noisy(self) -> bool:
        """An arm's rates spread by over a quarter, the machine swapped, or others kept every core busy."""
        swapped = self.after.page_outs > self.before.page_outs
        busy = self.before.load > (os.cpu_count() or 1)
        return swapped or busy or any(arm.spread > NOISY_SPREAD for arm in self.arms.values())

    def ratio(self, arm: str, base: str) -> float:
        """Decode rate of `arm` over that of `base`. TTDError where their tokens or logits differ."""
        a, b = self.arms[arm], self.arms[base]
        if (a.digest, a.logits_digest) != (b.digest, b.logits_digest):
            raise TTDError(f"{arm} and {base} did not give the same tokens and logits, so their speeds do not compare.")
        return a.decode_rate / b.decode_rate

    def to_json(self) -> dict[str, Any]:
        """Schema version, units and every figure, ready for json.dumps."""
        units = {"rates": "tokens/s", "seconds": "s", "bytes": "B", "misses": "expert records"}
        return {"schema": SCHEMA, "units": units, "noisy": self.noisy} | asdict(self)


def _percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _arm(options: Mapping[str, Any], runs: list[tuple[Response, Stats]]) -> Arm:
    responses, last = [response for response, _ in runs], runs[-1][1]
    digests = {(response.digest, response.logits_digest) for response in responses}
    if len(digests) > 1:
        raise TTDError(
            f"rounds with {dict(options)} did not give the same tokens and logits; this is a bug, report it."
        )
    seconds = [s for response in responses for s in response.step_seconds]
    misses = [float(m) for response in responses for m in response.step_misses]
    return Arm(
        dict(options),
        tuple(response.tokens_per_second or 0.0 for response in responses),
        tuple(response.first_token_seconds for response in responses),
        _percentile(seconds, 0.5),
        _percentile(seconds, 0.95),
        _percentile(misses, 0.5),
        _percentile(misses, 0.95),
        last.counters.bytes_read / (last.counters.prefill_tokens + last.counters.decode_steps),
        last.hit_rate,
        *digests.pop(),
    )


def compare(
    store: str | os.PathLike[str],
    arms: Mapping[str, Mapping[str, Any]],
    prompt: Prompt,
    max_tokens: int = 64,
    rounds: int = 3,
    warm: bool = False,
    **options: Any,
) -> Comparison:
    """Run `prompt` on `store` once an arm, `rounds` times round.

    arms: options of `load` by name, on top of `options`, which all share. Every run loads anew: its bank is cold;
    warm=True generates once unmeasured first. Exactly `max_tokens` tokens are made. OptionError for fewer than two.
    """
    if max_tokens < 2 or rounds < 1 or not arms:
        raise OptionError("compare needs at least one arm, one round and two tokens.")
    before = machine_state()
    runs: dict[str, list[tuple[Response, Stats]]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, own in arms.items():
            with load(store, replace=False, **{**options, **own}) as llm:
                if warm:
                    llm.generate(prompt, max_tokens=max_tokens, ignore_eos=True)
                    llm.stats(reset=True)
                response = llm.generate(prompt, max_tokens=max_tokens, ignore_eos=True)
                runs[name].append((response, llm.stats()))
    return Comparison({name: _arm(arms[name], found) for name, found in runs.items()}, before, machine_state())
