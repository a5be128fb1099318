"""Eviction policies on a recorded routing trace, beside Belady's optimum: `python -m benchmarks.policies TRACE`.

TRACE is a directory that `mlx-ttd trace` wrote. For each number of slots a layer: hit rates of every policy with slots
kept per layer and in one shared pool, and the best that any policy could reach; then working sets and reuse distances.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from mlx_ttd.observe import load_trace
from mlx_ttd.streaming import policy_names
from mlx_ttd.streaming.replay import Steps, belady, replay, reuse_distances, shared_pool, working_set

WINDOWS = (1, 4, 16, 64)


def routing(folder: Path) -> list[Steps]:
    """The chosen ids of each layer, a step a token."""
    trace = load_trace(folder)
    return [list(trace.arrays[f"{layer}.router.ids"]) for layer in range(trace.layers)]


def rates(layers: list[Steps], experts: int, slots: int) -> dict[str, float]:
    """Hit rate by "<policy>", "<policy>.shared" and "belady" at `slots` a layer."""
    found = {}
    for name in sorted(policy_names()):
        counts = np.sum([replay(steps, experts, slots, name) for steps in layers], axis=0)
        found[name] = counts[0] / counts[1]
        hits, requests = shared_pool(layers, experts, slots * len(layers), name)
        found[f"{name}.shared"] = hits / requests
    counts = np.sum([belady(steps, experts, slots) for steps in layers], axis=0)
    found["belady"] = counts[0] / counts[1]
    return {name: float(rate) for name, rate in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--experts", type=int, required=True, help="experts a layer of the model")
    parser.add_argument("--slots", type=int, nargs="+", default=[8, 12, 16, 24, 32, 48, 64])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    layers = routing(arguments.trace)
    top_k = max(len(np.unique(step)) for steps in layers for step in steps)
    results: dict[str, float] = {}
    for slots in (s for s in arguments.slots if top_k <= s <= arguments.experts):
        found = rates(layers, arguments.experts, slots)
        print(f"{slots:>4} slots  " + "  ".join(f"{name} {rate:.3f}" for name, rate in found.items()))
        results |= {f"slots_{slots}.{name}": rate for name, rate in found.items()}
    for window in WINDOWS:
        size = float(np.mean([working_set(steps, window) for steps in layers]))
        print(f"working set of {window} tokens: {size:.1f} experts a layer")
        results[f"working_set_{window}"] = size
    distances = np.concatenate([reuse_distances(steps) for steps in layers])
    for share in (50, 90):
        results[f"reuse_distance_p{share}"] = float(np.percentile(distances, share))
        print(f"reuse distance p{share}: {results[f'reuse_distance_p{share}']:.0f} experts")
    if arguments.json:
        arguments.json.write_text(json.dumps({"results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
