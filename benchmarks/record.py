"""RESULTS.json: for each benchmark and name the median, least and greatest of its rounds, and what code made them.

    python -m benchmarks.record NAME FILE ... [--commit COMMIT]

records the --json files of one benchmark, a round each, as one that ran on a machine with a GPU leaves them. On a CPU
`python -m benchmarks` runs the rounds and records them. An entry of a GPU is marked `older` once kernels or models
have changed since its commit.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.commits import GPU_CODE, ROOT, changed_since

RESULTS = ROOT / "benchmarks" / "RESULTS.json"
Round = Mapping[str, Any]
Entry = dict[str, Any]


def read(path: Path = RESULTS) -> dict[str, Entry]:
    return json.loads(path.read_text()) if path.exists() else {}


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, least, greatest and number of the rounds of one figure. ValueError for one that is no number."""
    if not values or not all(math.isfinite(value) for value in values):
        raise ValueError(f"{list(values)} are no figures of rounds.")
    return {
        "median": statistics.median(values),
        "least": min(values),
        "greatest": max(values),
        "rounds": len(values),
    }


def entry_of(rounds: Sequence[Round], commit: str | None, commands: Sequence[str]) -> Entry:
    """The entry of one benchmark from what its rounds wrote. ValueError where they are of different machines."""
    machines = [round_["machine"] for round_ in rounds]
    if any(machine != machines[0] for machine in machines):
        raise ValueError("the rounds were run on different machines or with different versions; run them anew.")
    figures: dict[str, list[float]] = {}
    for round_ in rounds:
        for name, value in round_["results"].items():
            figures.setdefault(name, []).append(value)
    return {
        "machine": machines[0],
        "noisy": any(round_.get("noisy", False) for round_ in rounds),
        "results": {name: summary(values) for name, values in figures.items()},
        "date": date.today().isoformat(),
        "commit": commit,
        "commands": list(commands),
    }


def on_gpu(entry: Entry) -> bool:
    machine = entry["machine"]
    return bool(machine.get("gpu") or machine.get("device"))


def mark_older(entries: dict[str, Entry], root: Path = ROOT) -> None:
    """Set `older` in the entries of a GPU; true also where git does not know their commit."""
    for entry in entries.values():
        if on_gpu(entry):
            entry["older"] = changed_since(entry["commit"], GPU_CODE, root) is not False


def write(entries: dict[str, Entry], path: Path = RESULTS) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(dict(sorted(entries.items())), indent=1) + "\n")
    os.replace(draft, path)


def record(new: dict[str, Entry], path: Path = RESULTS, root: Path = ROOT) -> dict[str, Entry]:
    """Put `new` in the place of the entries of the same benchmarks; the others stay."""
    entries = read(path) | new
    mark_older(entries, root)
    write(entries, path)
    return entries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of the benchmark")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="written by its --json, one a round")
    parser.add_argument("--commit", help="whose code was run, where a file does not say")
    arguments = parser.parse_args()
    rounds = [json.loads(path.read_text()) for path in arguments.files]
    stated = {round_.get("commit") or arguments.commit for round_ in rounds}
    commit = stated.pop()
    if stated or commit is None or commit.endswith("+"):
        raise SystemExit("the rounds are not all of one known commit; run them in a clean checkout, or give --commit.")
    record({arguments.name: entry_of(rounds, commit, [f"python -m benchmarks.{arguments.name}"])})


if __name__ == "__main__":
    main()
