"""How a budget is divided: resident weights, sequence state, scratch, and slots with all that is left."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import BudgetError, OptionError
from ..kernels import ATTENTION_BLOCK, BLOCK
from ..spec import FULL, ModelSpec
from ..store import Store
from .ledger import ALLOCATOR_RESERVE
from .memory import show_size


@dataclass(frozen=True)
class Division:
    """Bytes by purpose, and what they buy. `least` is the smallest budget that works; `mark` is 0 without one."""

    total: int
    least: int
    resident: int
    state: int
    scratch: int
    slots: int
    chunk: int
    mark: int


def block_scratch(spec: ModelSpec, itemsize: int, context: int, attention_scores: bool) -> int:
    """Bytes that one prefill block of BLOCK rows needs at its widest layer, and one row's logits with their copies.

    Counted in rows of f32 that live at once; the references keep more of them than fused kernels do, and attention's
    also scores of ATTENTION_BLOCK rows, and keys and values in f32, over the context.
    """
    over_context = 0
    gdn = 2 * spec.conv_width + 2 * spec.value_width
    attention = 6 * spec.heads * spec.head_dim + 2 * spec.kv_heads * spec.head_dim
    if attention_scores:
        gdn += spec.conv_width + 2 * spec.value_width
        attention += 2 * (spec.heads + spec.kv_heads) * spec.head_dim
        over_context = 3 * ATTENTION_BLOCK * spec.heads + 2 * spec.kv_heads * spec.head_dim
    experts = spec.top_k * (2 * spec.inter + spec.hidden) if spec.is_moe else 3 * spec.inter
    mixer = BLOCK * attention + over_context * context if FULL in spec.layer_types else 0
    widest = BLOCK * 6 * spec.hidden + max(BLOCK * gdn, mixer, BLOCK * experts)
    return widest * max(itemsize, 4) + 6 * spec.vocab * 4


def chunk_bytes(spec: ModelSpec, tokens: int, itemsize: int) -> int:
    """Bytes that span a prefill chunk of `tokens`: residual rows, normed rows, shared and routed sums, choices."""
    return tokens * (spec.hidden * (3 * itemsize + 3 * 4) + spec.top_k * 16)


def require_slots(spec: ModelSpec, slots: int) -> None:
    """OptionError where a layer's `slots` cannot hold what one token uses."""
    if slots < spec.top_k:
        raise OptionError(
            f"slots={slots} cannot hold the {spec.top_k} experts that a token uses in a layer; "
            f"give at least slots={spec.top_k}, or 0 for as many as memory holds."
        )


def divide(
    store: Store,
    total: int,
    state: int,
    context: int,
    itemsize: int,
    attention_scores: bool,
    chunk: int = 0,
    slots: int = 0,
    mark: int = 0,
) -> Division:
    """Divide `total` bytes. BudgetError names the least that works; a dense model must fit whole.

    chunk and slots fix those, slots up to all experts; 0 takes what fits: slots up to twice top-k, then a chunk of up
    to 8 blocks, then slots. OptionError for fewer slots than a token uses.
    mark: bytes of a state to come back to, held wherever they fit beside the least.
    """
    spec = store.spec
    if slots:
        require_slots(spec, slots)
        slots = min(slots, spec.experts)
    resident, strides = store.resident_bytes, store.expert_bytes
    block = block_scratch(spec, itemsize, context, attention_scores)
    fixed = resident + state + block + ALLOCATOR_RESERVE
    first_chunk = chunk_bytes(spec, chunk or BLOCK, itemsize)
    least_slots = max(spec.top_k, slots)
    least = fixed + first_chunk + least_slots * strides
    if total < least:
        reason = "" if spec.is_moe else " (a dense model reads every weight for each token, so it has to fit whole)"
        raise BudgetError(
            f"{store.path} needs at least {least:,} bytes ({show_size(least)}) and the budget is "
            f"{show_size(total)}{reason}: {show_size(resident)} resident weights, "
            f"{show_size(least_slots * strides)} for {least_slots} slots a layer, "
            f"{show_size(state)} state for {context:,} tokens, {show_size(block + first_chunk)} scratch, "
            f"{show_size(ALLOCATOR_RESERVE)} for the allocator; raise memory= to {least:,}.",
            least_bytes=least,
        )
    mark = mark if total - least >= mark else 0
    fixed += mark
    if not chunk:
        chunk = BLOCK
        comfortable = (slots or min(2 * spec.top_k, spec.experts)) * strides
        while chunk < 8 * BLOCK and fixed + chunk_bytes(spec, chunk * 2, itemsize) + comfortable <= total:
            chunk *= 2
    scratch = block + chunk_bytes(spec, chunk, itemsize)
    if not slots and spec.is_moe:
        slots = min(spec.experts, (total - resident - state - mark - scratch - ALLOCATOR_RESERVE) // strides)
    return Division(total, least, resident, state, scratch, slots, chunk, mark)
