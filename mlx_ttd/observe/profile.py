"""Where the time of a run goes, by phase."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field

import mlx.core as mx

PHASES = {
    "embedding": "embed",
    "input_norm": "norms",
    "post_norm": "norms",
    "final_norm": "norms",
    "gdn": "gdn",
    "attention": "attention",
    "router.ids": "router",
    "read": "read",
    "experts": "expert_ffn",
    "experts.wave": "expert_ffn",
    "mlp": "mlp",
    "shared": "shared",
    "hidden": "host",
    "logits": "head",
    "token": "sample",
    "host": "host",
}


@dataclass
class Profile:
    """A probe that evaluates each quantity as it is noted, and books the time since the last note on its phase.

    seconds: by phase; by_layer: by (layer, phase). scratch_bytes: the most that MLX held at a time beyond what it held
    at the first note; MLX's own peak starts anew there. What a run overlaps when nobody watches runs in turn here, so
    the parts are true and the whole is slower.
    """

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    by_layer: defaultdict[tuple[int, str], float] = field(default_factory=lambda: defaultdict(float))
    scratch_bytes: int = 0
    _last: float | None = None
    _held: int = 0

    def note(self, layer: int, name: str, arrays: tuple[mx.array, ...]) -> None:
        mx.eval(arrays)
        if self._last is None:
            mx.reset_peak_memory()
            self._held = mx.get_active_memory()
        self.scratch_bytes = max(self.scratch_bytes, mx.get_peak_memory() - self._held)
        now = time.perf_counter()
        if self._last is not None and name in PHASES:
            phase = PHASES[name]
            self.seconds[phase] += now - self._last
            self.by_layer[layer, phase] += now - self._last
        if name in PHASES or self._last is None:
            self._last = now

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def speed_up_if_free(self, phase: str) -> float:
        """How many times faster the run would be if `phase` took no time."""
        rest = self.total - self.seconds[phase]
        return self.total / rest if rest > 0 else float("inf")

    def table(self) -> str:
        """A line per phase, the longest first: milliseconds, share, and the speed-up if it were free. Then scratch."""
        rows = sorted(self.seconds.items(), key=lambda item: -item[1])
        lines = [
            f"{phase:<12}{1e3 * spent:>10.1f} ms{spent / self.total:>7.1%}{self.speed_up_if_free(phase):>8.2f}x if free"
            for phase, spent in rows
        ]
        return "\n".join([*lines, f"{'scratch':<12}{self.scratch_bytes / 1e6:>10.1f} MB"])
