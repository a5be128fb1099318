"""Programs to be measured side by side: each loaded in a process of its own, asked in turn."""

from __future__ import annotations

import multiprocessing as mp
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

import mlx_ttd


def load_options(given: Sequence[str]) -> dict[str, Any]:
    """Options of `mlx_ttd.load` from NAME=VALUE, whole numbers as such."""
    pairs = (pair.split("=", 1) for pair in given)
    return {name: int(value) if value.isdecimal() else value for name, value in pairs}


class Streamed:
    """This library on a store, within a budget. Prompts are random tokens."""

    def __init__(self, store: str, memory: int, context: int, options: dict[str, Any]):
        fixed: dict[str, Any] = {"context": context, "verify": "off", "progress": False}
        self.llm = mlx_ttd.load(store, memory=memory, **fixed | options)
        self.draws = np.random.default_rng(1)
        self.tokens: list[int] = []

    def prefill(self, count: int) -> float:
        """Seconds to the first token of a fresh prompt of `count` tokens."""
        prompt = self.draws.integers(0, self.llm.store.spec.vocab, count).tolist()
        response = self.llm.generate(prompt, max_tokens=1, temperature=0.0, ignore_eos=True)
        self.tokens = [*prompt, *response.tokens]
        return response.first_token_seconds

    def decode(self, count: int) -> list[float]:
        """Seconds of each of `count` tokens after what came before."""
        response = self.llm.generate(self.tokens, max_tokens=count + 1, temperature=0.0, ignore_eos=True)
        if response.cached_tokens < len(self.tokens) - 1:
            raise RuntimeError("decoding did not continue from the live state.")
        self.tokens += response.tokens
        return list(response.step_seconds[1:])

    def about(self) -> dict[str, Any]:
        """Effective options, kernels and bytes."""
        stats = self.llm.stats()
        counts = stats.counters
        return {
            "kernels": dict(stats.kernels),
            "peak_bytes": stats.peak_bytes,
            "host_syncs": counts.host_syncs,
            "hit_rate": stats.hit_rate,
        }


class Resident(Streamed):
    """This library on a store, every expert in memory."""

    def __init__(self, store: str, context: int, options: dict[str, Any]):
        slots = mlx_ttd.info(store)["experts"]
        least = mlx_ttd.info(store, slots=slots, context=context)["least_bytes"]
        super().__init__(store, least + 10**9, context, {"slots": slots, **options})
        provider = self.llm.provider
        assert provider is not None
        while not all(bank.everything_resident for bank in provider.banks):
            before = sum(int((bank.slot_of >= 0).sum()) for bank in provider.banks)
            self.prefill(min(512, context - 1))
            if sum(int((bank.slot_of >= 0).sum()) for bank in provider.banks) == before:
                raise RuntimeError("a prompt wanted no new expert and some are not in memory; write a store of skew 0.")


def _serve(make: Callable[..., Any], arguments: tuple[Any, ...], link: Connection) -> None:
    try:
        arm = make(*arguments)
        link.send(("ready", None))
        while (request := link.recv()) is not None:
            name, *given = request
            link.send(("done", getattr(arm, name)(*given)))
    except Exception:
        link.send(("failed", traceback.format_exc()))


class Arm:
    """`make(*arguments)` in a process of its own; `ask` calls one of its methods. A context manager that ends it."""

    def __init__(self, make: Callable[..., Any], *arguments: Any):
        context = mp.get_context("spawn")
        self.link, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(make, arguments, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self._answer()

    def _answer(self) -> Any:
        try:
            kind, value = self.link.recv()
        except EOFError:
            self.process.join()
            raise RuntimeError(f"the measured process died with exit code {self.process.exitcode}.") from None
        if kind == "failed":
            raise RuntimeError(value)
        return value

    def ask(self, method: str, *arguments: Any) -> Any:
        self.link.send((method, *arguments))
        return self._answer()

    def __enter__(self) -> Arm:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.is_alive():
            self.link.send(None)
        self.process.join()
