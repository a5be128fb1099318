"""How many expert requests a number of slots answers: curves measured by replaying recorded routing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np

CURVES = Path(__file__).with_name("hit_rates.json")
Curve = Mapping[float, float]


@cache
def _curves() -> dict[str, dict[str, object]]:
    return json.loads(CURVES.read_text())


def measured_curve(experts: int) -> Curve:
    """Hit rate by slots a layer for a model of `experts` experts: the measured curve of the nearest size, stretched."""
    near = min(_curves().values(), key=lambda curve: abs(np.log(experts / curve["experts"])))  # type: ignore[operator]
    rates: dict[str, float] = near["rates"]  # type: ignore[assignment]
    stretch = experts / near["experts"]  # type: ignore[operator]
    return {int(slots) * stretch: rate for slots, rate in rates.items()}


def hit_rate(curve: Curve, slots: float) -> float:
    """Share of requests answered from `slots` slots a layer, between the curve's points in a straight line."""
    points = sorted(curve)
    return float(np.interp(slots, points, [curve[point] for point in points]))
