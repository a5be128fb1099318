"""What the options mean for a store on this machine: the dtype of its rows, and the division of the memory budget."""

from __future__ import annotations

import mlx.core as mx

from . import kernels, state
from .options import Options
from .spec import ModelSpec
from .store import Store
from .streaming import Division, auto_budget, divide, parse_size

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16}


def residual_dtype(options: Options, for_gpu: bool = False) -> mx.Dtype:
    own = "bfloat16" if for_gpu or kernels.device_kind() != "cpu" else "float32"
    return DTYPES[own if options.dtype == "auto" else options.dtype]


def _attention_scores(spec: ModelSpec, for_gpu: bool) -> bool:
    """Whether a prompt's attention holds a block's scores over all keys, as the reference does."""
    kind = "gpu" if for_gpu else kernels.chosen("attention")
    return kind == "reference" or (kind == "gpu" and spec.head_dim not in kernels.ATTENTION_WIDTHS)


def total_bytes(memory: str | int, held: int = 0) -> int:
    """What a memory option means on this machine, in bytes, to somebody who holds some already."""
    return auto_budget(held) if memory == "auto" else parse_size(memory)


def divide_budget(
    store: Store, options: Options, context: int, total: int | None = None, for_gpu: bool = False
) -> Division:
    """How `total` bytes, by default `options.memory`, are divided for `store`. BudgetError names the least budget.

    for_gpu: for a machine whose GPU computes, whatever this one has.
    """
    if total is None:
        total = total_bytes(options.memory)
    dtype = residual_dtype(options, for_gpu)
    held = state.state_bytes(store.spec, context, dtype.size, options.kv_bits)
    chunk = -(-options.prefill_chunk // kernels.BLOCK) * kernels.BLOCK
    mark = store.spec.recurrent_bytes(dtype.size)
    scores = _attention_scores(store.spec, for_gpu)
    return divide(store, total, held, context, dtype.size, scores, chunk, options.slots, mark)
