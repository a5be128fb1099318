"""A machine as the numbers that decide a model's speed on it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np

from .errors import OptionError

MACHINES = Path(__file__).with_name("machines.json")


@dataclass(frozen=True)
class Machine:
    """packed_gb_s, plain_gb_s: 10^9 bytes a second at which kernels multiply by int4 and by bf16 weights.

    disk_gb_s: by reads asked for together, until the last has come. layer_us: the host's part of a streamed layer, its
    round trip included. multiply_gops: 10^9 multiplications and additions a second on a prompt. source: where the
    figures are from. discarded: figures that a probe did not believe, and why. computing: seconds of a decode step of
    the probed store that reads nothing, which then replace what the rates give; 0 where unknown.
    """

    name: str
    memory_bytes: float
    packed_gb_s: float
    plain_gb_s: float
    disk_gb_s: Mapping[int, float]
    page_cache_gb_s: float
    layer_us: float
    multiply_gops: float
    source: str
    discarded: Mapping[str, str] = field(default_factory=dict)
    computing: float = 0.0

    def disk(self, reads: float) -> float:
        """GB/s with `reads` in flight, between the depths that are known in proportion to the logarithm."""
        depths = sorted(self.disk_gb_s)
        if not depths:
            why = "; ".join(f"{figure}: {reason}" for figure, reason in self.discarded.items())
            raise OptionError(f"nothing is known of the disk of {self.name} ({why}); name another machine.")
        rates = [self.disk_gb_s[depth] for depth in depths]
        return float(np.interp(np.log(max(reads, 1.0)), np.log(depths), rates))


@cache
def machines() -> Mapping[str, Machine]:
    """The machines that machines.json describes, by short name."""
    found = {}
    for name, facts in json.loads(MACHINES.read_text()).items():
        disk = {int(depth): rate for depth, rate in facts.pop("disk_gb_s").items()}
        found[name] = Machine(**facts, disk_gb_s=disk)
    return found


def machine_named(name: str) -> Machine:
    """A described machine. OptionError names those there are."""
    if name not in machines():
        raise OptionError(f"machine {name!r} is unknown; known are {', '.join(machines())}; or probe this one.")
    return machines()[name]
