"""A model as mlx-lm calls it: `model(inputs, cache=...)` and `make_cache()`. Each call is one request of its engine.

Arrays are evaluated in the caller's thread before a call and in the engine's before they come back. What a call makes
of a cache holds from the moment at which the caller has the result, so an interrupted one has done nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import BusyError, KernelError
from ..kernels import Mode, to_host
from ..state import LayerState, OneSequence
from .core import Core
from .engine import Engine


class Shared:
    """The layers' states of one sequence, and where each of them is, which changes for all at once."""

    def __init__(self, layers: Sequence[LayerState]):
        self.layers = list(layers)
        self.moment = [layer.moment() for layer in layers]

    def settle(self) -> None:
        """Put the states where the last call that its caller has the result of left them."""
        for layer, moment in zip(self.layers, self.moment, strict=True):
            layer.go_to(moment)


class LayerCache(OneSequence):
    """One layer's place in a cache, as mlx-lm asks for it."""

    def __init__(self, shared: Shared, layer: int):
        self._shared, self._layer = shared, layer

    @property
    def offset(self) -> int:
        """Tokens that it has seen."""
        return self._shared.moment[self._layer][0]

    @property
    def arrays(self) -> list[mx.array]:
        return list(self._shared.moment[self._layer][1:]) or self._shared.layers[self._layer].arrays

    @property
    def nbytes(self) -> int:
        return self._shared.layers[self._layer].nbytes

    def is_trimmable(self) -> bool:
        return False


class ProtocolModel:
    """The model of an LLM for programs that drive models themselves. It serves any thread, one call at a time."""

    def __init__(self, engine: Engine, core: Core):
        self._engine = engine
        self._core = core

    def _run(self, work: Any) -> Any:
        self._core.settle_here()
        return self._engine.call(work)

    def _model(self) -> Any:
        if self._core.model is None:
            raise BusyError(self._engine.reason)
        return self._core.model

    def make_cache(self) -> list[LayerCache]:
        """An empty cache for one sequence of at most `context` tokens, which any thread may use."""
        shared = Shared(self._run(lambda: self._model().make_cache()))
        return [LayerCache(shared, i) for i in range(len(shared.layers))]

    def __call__(self, inputs: mx.array, cache: Any = None, mode: Mode | None = None) -> mx.array:
        """Logits f32 [1, T, vocab] of int token ids [1, T]; the cache, made here where there is none, moves on by T.

        mode: a single token decodes, more prefill, unless "verify" is asked.
        """
        # Its graph is this thread's.
        to_host(inputs)
        return self._moved(lambda model, state: model(inputs, state, mode), cache)

    def hidden_states(self, x: mx.array, cache: Any, mode: Mode) -> mx.array:
        """Rows after the last layer, before the final norm: [T, H] from embeddings x [T, H]; `cache` moves on by T."""
        mx.eval(x)
        return self._moved(lambda model, state: model.hidden_states(x, state, mode), cache)

    def embed(self, tokens: np.ndarray) -> mx.array:
        """Embedding rows [n, H] of int token ids [n]."""
        return self._evaluated(lambda model: model.embed(tokens))

    def logits(self, x: mx.array, mode: Mode, window: tuple[int, int] | None = None) -> mx.array:
        """Logits f32 [T, n] of rows [T, H] from `hidden_states`, for all or a window of the vocabulary."""
        mx.eval(x)
        return self._evaluated(lambda model: model.logits(x, mode, window))

    def _evaluated(self, work: Any) -> mx.array:
        def run() -> mx.array:
            with self._core.using():
                made = work(self._model())
                mx.eval(made)
                return made

        return self._run(run)

    def _moved(self, work: Any, cache: Any) -> mx.array:
        shared = shared_by(self.make_cache() if cache is None else cache)

        def run() -> tuple[mx.array, Any]:
            shared.settle()
            with self._core.using(), self._engine.cancellable():
                made = work(self._model(), shared.layers)
                mx.eval(made, [layer.arrays for layer in shared.layers])
                return made, [layer.moment() for layer in shared.layers]

        made, moment = self._run(run)
        shared.moment = moment
        return made

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model(), name)


def shared_by(cache: Any) -> Shared:
    """What the layers of a cache share. KernelError where they are not one whole sequence's of this library."""
    first = cache[0] if isinstance(cache, Sequence) and len(cache) else None
    shared = first._shared if isinstance(first, LayerCache) else None
    whole = shared is not None and len(cache) == len(shared.layers)
    if not whole or any(not isinstance(c, LayerCache) or c._shared is not shared for c in cache):
        raise KernelError("the cache is not one that this model's make_cache() made, whole; make one and pass it on.")
    assert shared is not None
    return shared
