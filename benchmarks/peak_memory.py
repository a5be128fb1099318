"""Memory of a process that runs a store: its peak above what the process had before, and what a generation leaves.

    python -m benchmarks.peak_memory STORE BUDGET PROMPTS LONGEST [OPTION=VALUE ...]    prints JSON

Prompts are of random tokens and of 1 to LONGEST of them. "growth" is the slope of the resident set in bytes a prompt
over the second half of the prompts, "live" that of the bytes of live arrays.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

import mlx_ttd
from benchmarks import command

INTERVAL = 0.01
STEPS = 4


def resident_set() -> int:
    """Bytes of this process in memory now (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def main() -> None:
    store, budget, prompts, longest, *options = sys.argv[1:]
    mx.eval(mx.zeros(8) + 1)
    before, peak, ended = resident_set(), 0, threading.Event()

    def sample() -> None:
        nonlocal peak
        while not ended.is_set():
            peak = max(peak, resident_set())
            time.sleep(INTERVAL)

    watcher = threading.Thread(target=sample, daemon=True)
    watcher.start()
    draws = np.random.default_rng(0)
    pairs = [option.split("=", 1) for option in options]
    given: dict[str, Any] = {name: int(value) if value.isdigit() else value for name, value in pairs}
    with mlx_ttd.load(store, int(budget), progress=False, **given) as llm:
        after_load = resident_set()
        sizes, arrays = [], []
        for _ in range(int(prompts)):
            length = int(draws.integers(1, int(longest) + 1))
            llm.generate(draws.integers(0, llm.store.spec.vocab, length).tolist(), max_tokens=STEPS, ignore_eos=True)
            sizes.append(resident_set())
            arrays.append(mx.get_active_memory())
        slots, chunk = llm.division.slots, llm.division.chunk
    ended.set()
    watcher.join()
    over = peak - before - int(budget)
    found = {"before": before, "after_load": after_load, "peak": peak, "slots": slots, "chunk": chunk, "over": over}
    print(json.dumps(found | {"growth": slope(sizes), "live": slope(arrays)}))


def slope(values: list[int]) -> float:
    """Growth from one value to the next over the second half of them: the median of the slopes between any two (Theil
    and Sen), as an allocator's rare steps are no steady growth."""
    half = np.array(values[len(values) // 2 :], float)
    first, second = np.triu_indices(len(half), 1)
    return float(np.median((half[second] - half[first]) / (second - first))) if len(half) > 1 else 0.0


def over_budget(store: Path | str, budget: int, prompts: int, *options: str, longest: int = 600) -> dict[str, Any]:
    """Run `prompts` random prompts in a fresh process; bytes; `over` = peak - before - budget."""
    numbers = (str(number) for number in (budget, prompts, longest))
    command = [sys.executable, "-m", "benchmarks.peak_memory", str(store), *numbers, *options]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent.parent)
    return json.loads(result.stdout)


if __name__ == "__main__":
    command.run(main)
