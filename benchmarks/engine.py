"""What a thread of its own for each model costs a token, beside a bare round trip between two threads in the same run.

    python -m benchmarks.engine [--json FILE] [--rounds N] [--tokens 200]

The demo model decodes the same tokens through `llm.stream` and by its own loop in the calling thread, a token of either
in turn, sampling and text included; `engine.cost_us` is the median of what the first takes longer, to be at most 1.5
round trips and 20 us, of which `engine.of_allowed` is the share. Half a minute.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import mlx_ttd
from benchmarks import command
from benchmarks.block import Block, spread
from mlx_ttd.generation import Chunk, Record, generation_options
from mlx_ttd.session.pieces import Piece

PROMPT, TRIPS, WARM, ALLOWED = "In the beginning", 5000, 200, (1.5, 20e-6)


def round_trip(trips: int = TRIPS) -> float:
    """Median seconds of a question to another thread and its answer, each by a queue.SimpleQueue."""
    questions: SimpleQueue[int | None] = SimpleQueue()
    answers: SimpleQueue[int] = SimpleQueue()

    def answer() -> None:
        while (question := questions.get()) is not None:
            answers.put(question)

    thread = threading.Thread(target=answer)
    thread.start()
    spent = []
    for number in range(trips + WARM):
        began = time.perf_counter()
        questions.put(number)
        answers.get()
        spent.append(time.perf_counter() - began)
    questions.put(None)
    thread.join()
    return statistics.median(spent[WARM:])


def direct(llm: mlx_ttd.LLM, options: dict[str, Any]) -> Iterator[Chunk]:
    """The pieces of `llm.stream` where the calling thread runs the loop, samples and makes text by itself."""
    given, record = generation_options(options), Record()
    for event in llm._core.generation(llm._prepared(PROMPT, given), given):
        if isinstance(event, Piece):
            record.add(event.step, event.chunk, event.prompt_tokens, event.cached_tokens)
            yield event.chunk


def pairs(llm: mlx_ttd.LLM, options: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Seconds of each piece but the first, through `llm.stream` and directly, one of either in turn."""
    arms = (llm.stream(PROMPT, **options), direct(llm, options))
    spent: tuple[list[float], list[float]] = ([], [])
    for token in range(options["max_tokens"]):
        # Each follows the other as often as it goes first.
        for arm in (0, 1) if token % 2 else (1, 0):
            began = time.perf_counter()
            next(arms[arm])
            spent[arm].append(time.perf_counter() - began)
    return spent[0][1:], spent[1][1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=200)
    arguments = parser.parse_args()
    options = {"max_tokens": arguments.tokens, "temperature": 0.0, "ignore_eos": True}
    block = Block("engine", {"rounds": arguments.rounds, **options})
    block.note("cache", "every expert resident, warm")
    trips, through, alone, costs = [], [], [], []
    slots = mlx_ttd.info("demo")["experts"]
    with mlx_ttd.load("demo", "300MB", slots=slots, progress=False) as llm:
        pairs(llm, options)
        for _ in range(arguments.rounds):
            trips.append(round_trip())
            ours, bare = pairs(llm, options)
            through.append(statistics.median(ours))
            alone.append(statistics.median(bare))
            costs.append(statistics.median(a - b for a, b in zip(ours, bare, strict=True)))
    factor, constant = ALLOWED
    for name, values in (("round_trip", trips), ("streamed", through), ("direct", alone), ("cost", costs)):
        block.results[f"engine.{name}_us"] = statistics.median(values) * 1e6
        block.note(f"{name} us", spread([value * 1e6 for value in values]))
    block.results["engine.of_allowed"] = statistics.median(
        cost / (factor * trip + constant) for cost, trip in zip(costs, trips, strict=True)
    )
    block.finish(arguments.json)


if __name__ == "__main__":
    command.run(main)
