"""A model put together from its store: the bytes it is allowed, its experts' provider, its weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from . import kernels
from .allocation import residual_dtype
from .layers import ResidentWeights
from .models import Model, model_class
from .observe import Counters
from .options import Options
from .store import Store
from .streaming import (
    ALLOCATOR_RESERVE,
    Division,
    EmbeddingRows,
    ExpertProvider,
    Ledger,
    ReadPool,
    ReadThreads,
)


@dataclass(frozen=True)
class Assembly:
    """The parts of a loaded model. provider: None for a dense model; embedding: None where the head holds it."""

    model: Model
    provider: ExpertProvider | None
    embedding: EmbeddingRows | None


def enter_division(ledger: Ledger, division: Division) -> None:
    """Enter all that `division` gives away but the slots, which their provider enters."""
    ledger.enter("allocator", ALLOCATOR_RESERVE)
    ledger.enter("resident", division.resident)
    ledger.enter("state", division.state)
    ledger.enter("mark", division.mark)
    ledger.enter("scratch", division.scratch)


def assemble(
    store: Store,
    options: Options,
    division: Division,
    context: int,
    ledger: Ledger,
    counters: Counters,
    threads: ReadThreads | None,
    report: Callable[[int, int], None],
) -> Assembly:
    """Read the resident weights and make the banks. threads: those that another model reads on, to share them.

    report: called with the bytes of weights read so far and of all.
    """
    kernels.require_simd_width()
    provider = None
    if store.spec.is_moe:
        pool = ReadPool(options.depth, options.parts, counters, threads=threads)
        slots, policy = division.slots, options.policy
        provider = ExpertProvider(
            store, slots, ledger, counters, pool, policy, options.verify, options.read_mode, options.prefetch
        )
    weights = ResidentWeights(store, lambda done: report(done, division.resident))
    embedding = None
    if store.embedding:
        embedding = EmbeddingRows(store.embedding, store.quantisation("embedding"), counters)
    kind = model_class(store.spec.model_type)
    dtype, rounded = residual_dtype(options), options.matmul == "bf16"
    model = kind(store.spec, weights, provider, embedding, dtype, options.kv_bits, context, rounded)
    mx.eval(model.parameters())
    counters.resident_bytes = weights.bytes_read
    return Assembly(model, provider, embedding)
