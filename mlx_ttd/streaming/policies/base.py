"""What an eviction policy is: a score per expert of one layer; the lowest score goes first."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ...errors import OptionError


class Policy:
    """Scores for the experts of one layer. Subclasses update `score` f64 [experts] as experts are used or read."""

    def __init__(self, experts: int):
        self.score = np.zeros(experts)

    def used(self, experts: np.ndarray) -> None:
        """These experts (distinct ids) serve the current call."""

    def inserted(self, experts: np.ndarray) -> None:
        """These experts were just read into slots."""

    def victims(self, candidates: np.ndarray, count: int) -> np.ndarray:
        """The `count` experts among `candidates` to evict: lowest score, then lowest id."""
        order = np.lexsort((candidates, self.score[candidates]))
        return candidates[order[:count]]


_registry: dict[str, type[Policy]] = {}


def policy(name: str):  # type: ignore[no-untyped-def]
    """Class decorator: make a policy available under `name`."""

    def add(cls: type[Policy]) -> type[Policy]:
        _registry[name] = cls
        return cls

    return add


def policy_names() -> Iterable[str]:
    return sorted(_registry)


def make_policy(name: str, experts: int) -> Policy:
    """A fresh policy for a layer of `experts`. OptionError names the known ones."""
    if name not in _registry:
        raise OptionError(f"policy {name!r} is unknown; choose one of {', '.join(policy_names())}.")
    return _registry[name](experts)
