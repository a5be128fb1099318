"""A streamed model on a store of the real shapes with a live sequence of random tokens, and the experts it chooses."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np

import mlx_ttd
from benchmarks.synthetic_store import plan_store, read_shape
from mlx_ttd.allocation import divide_budget
from mlx_ttd.generation.decode import Running, decode, prefill
from mlx_ttd.options import make_options
from mlx_ttd.session.core import Core
from mlx_ttd.spec import model_spec
from mlx_ttd.store import store_of_plan
from mlx_ttd.store.checkpoint import Checkpoint

SHAPE, WARM = "qwen3.6-35b-a3b", 24


def slots_of_whole_model(memory: int, context: int = 4096) -> int:
    """Slots a layer that `memory` buys for all 40 layers, keys and values in bf16."""
    config = read_shape(SHAPE)
    made = store_of_plan(
        Checkpoint(Path(SHAPE), config, model_spec(config), {}, ""), plan_store(config, None, None, Path(SHAPE))
    )
    return divide_budget(made, make_options({"dtype": "bfloat16"}), context, memory).slots


def load(
    store: Path, slots: int, read_mode: str = "direct", context: int = 4096, chunk: int = 0, **options: Any
) -> mlx_ttd.LLM:
    fixed: dict[str, Any] = {
        "slots": slots,
        "read_mode": read_mode,
        "context": context,
        "prefill_chunk": chunk,
    } | options
    least = mlx_ttd.info(store, **fixed)["least_bytes"]
    return mlx_ttd.load(store, least + 10**8, verify="off", progress=False, replace=False, **fixed)


T = TypeVar("T")


def in_engine(llm: mlx_ttd.LLM, work: Callable[[Core], T]) -> T:
    """What `work` makes of the parts of a model, in the thread that runs it."""
    core = llm._core

    def run() -> T:
        with core.using():
            return work(core)

    return llm.engine.call(run)


def new_sequence(core: Core) -> Running:
    return Running(core.model, core.model.make_cache())


def read_prompt(llm: mlx_ttd.LLM, ids: Sequence[int], chunk: int) -> float:
    """Seconds that a new sequence takes to read `ids`."""

    def read(core: Core) -> float:
        sequence, began = new_sequence(core), time.perf_counter()
        for _ in prefill(sequence, ids, chunk, core.counters):
            pass
        return time.perf_counter() - began

    return in_engine(llm, read)


class LiveArm:
    """A model with a live sequence of random tokens; `seconds(n)` decodes n more of them."""

    def __init__(self, llm: mlx_ttd.LLM, seed: int = 0, warm: int = WARM):
        self.llm, self.draws = llm, np.random.default_rng(seed)
        self.sequence = in_engine(llm, new_sequence)
        self.seconds(warm)

    def token(self) -> int:
        return int(self.draws.integers(0, self.llm.store.spec.vocab))

    def seconds(self, steps: int) -> list[float]:
        return in_engine(self.llm, lambda core: [self._step(core) for _ in range(steps)])

    def _step(self, core: Core) -> float:
        token, began = self.token(), time.perf_counter()
        decode(self.sequence, token, core.counters)
        return time.perf_counter() - began


class Choices:
    """A probe that collects the experts that were chosen, by layer and call."""

    def __init__(self) -> None:
        self.steps: dict[int, list[np.ndarray]] = {}

    def note(self, layer: int, name: str, arrays: Sequence[mx.array]) -> None:
        if name == "router.ids":
            self.steps.setdefault(layer, []).append(np.unique(np.array(arrays[0])))
