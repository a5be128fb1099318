"""What a model will do on a machine, told before it is downloaded or run: from headers, bytes and bandwidths."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import comb, inf, prod
from typing import Any

from . import kernels
from .allocation import divide_budget
from .backends import force_backend
from .errors import BudgetError, OptionError
from .hit_rate import Curve, hit_rate, measured_curve
from .machine import Machine, machine_named
from .options import Options, make_options
from .probe_machine import probe
from .spec import trunk_tensors, user_path
from .store import Store, is_hub_id, open_store, planned_store
from .store_paths import store_path
from .streaming import auto_budget, machine_memory, parse_size, show_size

TARGET = "m2-8gb"
PROMPT = 512
SYSTEM_BYTES = 2.5e9


@dataclass(frozen=True)
class Forecast:
    """A forecast, not a measurement. Sizes are bytes, times seconds.

    step: how the time of a decoded token divides: "dense" weights, "experts" that are multiplied and "host" work, all
    three as "computing" where that was measured, and "reading" that nothing hides. page_cache: share of reads that the
    system's page cache answers. prompt_tokens is the prompt whose first_token_seconds and prefill_tok_s are forecast.
    advice: what misses the wanted rate.
    """

    source: str
    machine: Machine
    memory: int
    least_bytes: int
    fits: bool
    slots: int
    experts: int
    hit_rate: float
    page_cache: float
    bytes_per_token: float
    step: Mapping[str, float]
    tok_s: float
    prompt_tokens: int
    prefill_tok_s: float
    first_token_seconds: float
    advice: str = ""

    def to_json(self) -> dict[str, Any]:
        """Every figure, ready for json.dumps."""
        return asdict(self)

    def __str__(self) -> str:
        if not self.fits:
            return (
                f"{self.source} does not fit {show_size(self.memory)}: it needs at least {show_size(self.least_bytes)} "
                f"({self.least_bytes:,} bytes)"
            )
        parts = ", ".join(f"{name} {1e3 * spent:.1f}" for name, spent in self.step.items())
        rows = {
            "machine": f"{self.machine.name} ({self.machine.source})",
            "memory": f"{show_size(self.memory)}, at least {show_size(self.least_bytes)} needed",
            "experts": f"{self.slots} of {self.experts} a layer in memory, {self.hit_rate:.0%} of requests met there",
            "reads": f"{show_size(self.bytes_per_token)} a token, {self.page_cache:.0%} of them from page cache",
            "decode": f"{self.tok_s:.2f} tok/s (forecast); ms a token: {parts}",
            "prompt": f"{self.prompt_tokens:,} tokens at {self.prefill_tok_s:.0f} tok/s, first token after "
            f"{self.first_token_seconds:.1f} s (forecast)",
        }
        rows |= {f"discarded {figure}": reason for figure, reason in self.machine.discarded.items()}
        if self.advice:
            rows["wanted"] = self.advice
        return "\n".join(f"{name + ':':<10}{text}" for name, text in rows.items())


def _plain_bytes(store: Store) -> int:
    """Bytes of the resident tensors that are not packed."""
    names = (t.name for t in trunk_tensors(store.spec) if t.name in store.resident)
    return sum(store.resident[name].nbytes for name in names if store.quantisation(name) is None)


def _multiplications(store: Store) -> float:
    """Multiplications and additions of one prompt token, the head apart."""
    spec = store.spec
    dense = sum(
        prod(t.shape) for t in trunk_tensors(spec) if t.kind == "matrix" and t.name not in ("embedding", "head")
    )
    layouts = [layout for layout in store.layouts if layout is not None]
    experts = sum(layout.gate_up.rows * layout.hidden + layout.hidden * layout.inter for layout in layouts)
    return 2.0 * (dense + spec.top_k * experts)


def _binomial(count: int, chance: float) -> list[float]:
    """Probabilities of 0 to `count` successes."""
    return [comb(count, n) * chance**n * (1 - chance) ** (count - n) for n in range(count + 1)]


def step_seconds(
    store: Store, machine: Machine, slots: int, rate: float, page_cache: float, depth: int, parts: int
) -> dict[str, float]:
    """Seconds of a decode step by phase, at a hit rate and a share of reads that the page cache answers.

    Reads of a layer go out together, so their number, in each layer another, decides the disk's rate; experts in memory
    are multiplied meanwhile.
    """
    spec = store.spec
    plain = _plain_bytes(store)
    wanted_bytes = spec.top_k * store.expert_bytes
    reading = 0.0
    if rate < 1 and slots < spec.experts:
        for misses, chance in enumerate(_binomial(spec.top_k, 1 - rate)[1:], 1):
            missed_bytes = chance * misses * store.expert_bytes
            reading += missed_bytes * page_cache / machine.page_cache_gb_s / 1e9
            if page_cache < 1:
                reading += missed_bytes * (1 - page_cache) / machine.disk(min(depth, misses * parts)) / 1e9
    experts = wanted_bytes / machine.packed_gb_s / 1e9
    hidden = min(reading, experts * rate)
    if machine.computing:
        return {"computing": machine.computing, "reading": reading - hidden}
    return {
        "dense": (store.resident_bytes - plain) / machine.packed_gb_s / 1e9 + plain / machine.plain_gb_s / 1e9,
        "experts": experts,
        "host": len(spec.layer_types) * machine.layer_us / 1e6,
        "reading": reading - hidden,
    }


def first_token(store: Store, machine: Machine, tokens: int, chunk: int, step: float, page_cache: float) -> float:
    """Seconds until a prompt of `tokens` has been read and one token chosen, from empty slots."""
    spec, total, left = store.spec, step, tokens - 1
    strides = store.expert_bytes
    while left > 0:
        rows = min(chunk, left)
        distinct = spec.experts * (1 - (1 - spec.top_k / spec.experts) ** rows) if spec.is_moe else 0.0
        reading = 0.0
        if distinct:
            reading = distinct * strides * page_cache / machine.page_cache_gb_s / 1e9
            if page_cache < 1:
                reading += distinct * strides * (1 - page_cache) / machine.disk(max(machine.disk_gb_s, default=1)) / 1e9
        total += max(reading, rows * _multiplications(store) / machine.multiply_gops / 1e9)
        left -= rows
    return total


def _advice(wanted: float, step: Mapping[str, float]) -> str:
    budget, spent = 1 / wanted, sum(step.values())
    if spent <= budget:
        return f"{wanted:g} tok/s leaves {1e3 * budget:.1f} ms a token, of which {1e3 * spent:.1f} are used"
    largest = max(step, key=lambda name: step[name])
    return (
        f"{wanted:g} tok/s leaves {1e3 * budget:.1f} ms a token and {1e3 * spent:.1f} are needed; "
        f"the largest part is {largest}, {1e3 * step[largest]:.1f}"
    )


def _store(source: str | os.PathLike[str], options: Options, head_bits: int | None) -> Store:
    given = user_path(source)
    checkpoint = (given / "config.json").is_file() and not os.path.lexists(given / "manifest.json")
    stored = user_path(options.stores) / f"{source}.ttd" / "manifest.json"
    hub = is_hub_id(source) and not os.path.lexists(stored)
    if checkpoint or hub:
        return planned_store(source, head_bits)
    path = store_path(source, options)
    if head_bits is not None:
        raise OptionError(f"head_bits is of use with a checkpoint alone, and {path} is a store, which has its head.")
    return open_store(path, options.follow_links)


def _check(prompt_tokens: int | None, wanted_tok_s: float | None) -> None:
    if prompt_tokens is not None and (type(prompt_tokens) is not int or prompt_tokens < 1):
        raise OptionError(f"prompt_tokens is {prompt_tokens!r}; it must be an integer of at least 1.")
    if wanted_tok_s is not None and not 0 < wanted_tok_s < inf:
        raise OptionError(f"wanted_tok_s is {wanted_tok_s!r}; it must be a number above 0.")


def _prompt(tokens: int | None, store: Store, options: Options) -> int:
    """The length of the prompt to forecast. OptionError for one that the context does not hold."""
    most = store.spec.max_context
    context = min(options.context, most)
    if tokens is None:
        return min(PROMPT, context)
    if tokens > context:
        hint = f"plan with context={tokens}" if tokens <= most else f"take another model: this one reads {most:,}"
        raise OptionError(f"prompt_tokens is {tokens:,} and the context {context:,}; shorten the prompt or {hint}.")
    return tokens


def forecast(
    store: Store, options: Options, machine: Machine, memory: int, prompt_tokens: int = PROMPT,
    curve: Curve | None = None, wanted_tok_s: float | None = None,
) -> Forecast:  # fmt: skip
    """As `plan`, for an opened store, a machine and a budget in bytes."""
    spec = store.spec
    context = min(options.context, spec.max_context)
    try:
        # Described machines are Macs.
        division = divide_budget(store, options, context, memory, for_gpu=machine.source != "probed")
    except BudgetError as error:
        least = error.least_bytes or 0
        return Forecast(str(store.path), machine, memory, least, False, 0, spec.experts, 0, 0, 0, {}, 0, 0, 0, 0)
    strides = store.expert_bytes
    curve = curve or (measured_curve(spec.experts) if spec.is_moe else {0: 1.0})
    rate = hit_rate(curve, division.slots)
    cached = 0.0
    if spec.is_moe and options.read_mode == "cached" and rate < 1:
        room = (machine.memory_bytes - memory - SYSTEM_BYTES) / strides
        cached = max(0.0, hit_rate(curve, min(room, spec.experts)) - rate) / (1 - rate) if room >= spec.top_k else 0.0
    step = step_seconds(store, machine, division.slots, rate, cached, options.depth, options.parts)
    seconds = sum(step.values())
    first = first_token(store, machine, prompt_tokens, division.chunk, seconds, cached)
    return Forecast(
        str(store.path), machine, memory, division.least, True, division.slots, spec.experts, rate, cached,
        spec.top_k * (1 - rate) * strides, step, 1 / seconds, prompt_tokens, prompt_tokens / first, first,
        _advice(wanted_tok_s, step) if wanted_tok_s else "",
    )  # fmt: skip


def plan(
    source: str | os.PathLike[str],
    memory: str | int = "auto",
    machine: str | Machine = TARGET,
    *,
    prompt_tokens: int | None = None,
    hit_rates: Curve | None = None,
    wanted_tok_s: float | None = None,
    head_bits: int | None = None,
    **options: Any,
) -> Forecast:
    """Forecast from headers alone whether `source` fits `memory` on `machine`, what the budget buys, and the speed.

    source: a store, a checkpoint directory or a hub id (then `head_bits` is that of the conversion). machine: a name
    of machines.json, a `Machine`, or "this", which is probed with the store's own records. prompt_tokens: 512, or the
    context where that is less. hit_rates: hit rate by slots a layer; by default the curve measured on skewed routing.
    wanted_tok_s: how the time of a token would have to divide. The other options are those of `load`. memory="auto" is
    MLX_TTD_MEMORY, else half of the machine's memory. Raises OptionError for what cannot be, such as a budget beyond
    the machine's memory.
    """
    _check(prompt_tokens, wanted_tok_s)
    chosen = make_options({"memory": memory, **options} if memory != "auto" else options)
    if machine == "this":
        name, held, auto = "this machine", float(machine_memory()[0]), auto_budget()
    else:
        machine = machine_named(machine) if isinstance(machine, str) else machine
        name, held, auto = machine.name, machine.memory_bytes, int(machine.memory_bytes / 2)
    total = auto if chosen.memory == "auto" else parse_size(chosen.memory)
    if total > held:
        raise OptionError(f"memory is {show_size(total)} and {name} has {show_size(held)}; give no more.")
    store = _store(source, chosen, head_bits)
    tokens = _prompt(prompt_tokens, store, chosen)
    if isinstance(machine, Machine):
        return forecast(store, chosen, machine, total, tokens, hit_rates, wanted_tok_s)
    if not store.manifest.files:
        raise OptionError(f"{source} is not converted yet, so there are no records to probe the disk with.")
    with kernels.forced(kernels.forced_kind()):
        force_backend(chosen.backend)
        return forecast(store, chosen, probe(store), total, tokens, hit_rates, wanted_tok_s)
