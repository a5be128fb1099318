"""Policies replayed offline on recorded routing: what they would have hit, beside what any policy could have."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .policies import make_policy

Steps = Sequence[np.ndarray]


def replay(steps: Steps, experts: int, slots: int, policy: str) -> tuple[int, int]:
    """(hits, requests) of one layer. steps: the expert ids of each call, any shape, at most `slots` distinct ones."""
    chooser, resident = make_policy(policy, experts), np.zeros(experts, bool)
    hits = requests = 0
    for step in steps:
        wanted = np.unique(step)
        chooser.used(wanted)
        missing = wanted[~resident[wanted]]
        hits, requests = hits + len(wanted) - len(missing), requests + len(wanted)
        resident[missing] = True
        over = int(resident.sum()) - slots
        if over > 0:
            candidates = np.setdiff1d(np.flatnonzero(resident), wanted, assume_unique=True)
            resident[chooser.victims(candidates, over)] = False
        chooser.inserted(missing)
    return hits, requests


def belady(steps: Steps, experts: int, slots: int) -> tuple[int, int]:
    """(hits, requests) of Belady's optimum (1966): evict what is used again last."""
    calls = [np.unique(step) for step in steps]
    uses: list[list[int]] = [[] for _ in range(experts)]
    for t in range(len(calls) - 1, -1, -1):
        for expert in calls[t]:
            uses[expert].append(t)
    resident = np.zeros(experts, bool)
    hits = requests = 0
    for wanted in calls:
        for expert in wanted:
            uses[expert].pop()
        found = int(resident[wanted].sum())
        hits, requests = hits + found, requests + len(wanted)
        resident[wanted] = True
        over = int(resident.sum()) - slots
        if over > 0:
            candidates = np.setdiff1d(np.flatnonzero(resident), wanted, assume_unique=True)
            next_use = np.array([uses[expert][-1] if uses[expert] else len(calls) for expert in candidates])
            resident[candidates[np.argsort(-next_use, kind="stable")[:over]]] = False
    return hits, requests


def shared_pool(layers: Sequence[Steps], experts: int, slots: int, policy: str) -> tuple[int, int]:
    """(hits, requests) of one pool of `slots` for all layers together, called layer after layer, step after step."""
    ids = [step + experts * layer for steps in zip(*layers, strict=True) for layer, step in enumerate(steps)]
    return replay(ids, experts * len(layers), slots, policy)


def reuse_distances(steps: Steps) -> np.ndarray:
    """For each use of an expert after its first: how many other experts were used in between, int [uses]."""
    stack: list[int] = []
    distances = []
    for step in steps:
        wanted = np.unique(step).tolist()
        for expert in wanted:
            if expert in stack:
                distances.append(len(stack) - 1 - stack.index(expert))
        stack = [expert for expert in stack if expert not in wanted] + wanted
    return np.array(distances, int)


def working_set(steps: Steps, window: int) -> float:
    """Mean number of distinct experts in `window` successive steps."""
    counts = [len(np.unique(np.concatenate(steps[i : i + window], axis=None))) for i in range(len(steps) - window + 1)]
    return float(np.mean(counts)) if counts else float("nan")
