"""What the options mean for a store on this machine: the dtype of its rows, and the division of the memory budget."""

from __future__ import annotations

import mlx.core as mx

from . import kernels, state
from .options import Options
from .store import Store
from .streaming import Division, auto_budget, divide, parse_size

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16}


def residual_dtype(options: Options) -> mx.Dtype:
    own = "float32" if kernels.device_kind() == "cpu" else "bfloat16"
    return DTYPES[own if options.dtype == "auto" else options.dtype]


def _attention_scores() -> bool:
    """Whether a prompt's attention holds a block's scores over all keys, as all but the native one does."""
    return kernels.chosen("attention") != "native"


def total_bytes(memory: str | int) -> int:
    """What a memory option means on this machine, in bytes."""
    return auto_budget() if memory == "auto" else parse_size(memory)


def divide_budget(store: Store, options: Options, context: int, total: int | None = None) -> Division:
    """How `total` bytes, by default `options.memory`, are divided for `store`. BudgetError names the least budget."""
    if total is None:
        total = total_bytes(options.memory)
    dtype = residual_dtype(options)
    held = state.state_bytes(store.spec, context, dtype.size, options.kv_bits)
    chunk = -(-options.prefill_chunk // kernels.BLOCK) * kernels.BLOCK
    mark = store.spec.recurrent_bytes(dtype.size)
    return divide(store, total, held, context, dtype.size, _attention_scores(), chunk, options.slots, mark)
