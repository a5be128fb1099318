"""Every option of `load`, with its default, its range and its environment variable."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from .errors import OptionError, known_names
from .spec import plain_number
from .streaming import PREFETCH, parse_size, policy_names

PREFIX = "MLX_TTD_"
# MLX_TTD_DEBUG, which the kernels read: slot indices are checked.
NO_OPTIONS = ("debug",)
TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
DTYPES = ("auto", "float32", "bfloat16")
DEFAULTS_FILE = Path(__file__).with_name("defaults.json")
MEASURED = {name: entry["value"] for name, entry in json.loads(DEFAULTS_FILE.read_text()).items()}


def _option(default: Any, doc: str, choices: tuple[str | int, ...] = (), low: int = 0, high: int = 0) -> Any:
    return field(default=default, metadata={"doc": doc, "choices": choices, "low": low, "high": high})


@dataclass(frozen=True)
class Options:
    """How a model is loaded. MLX_TTD_<NAME> sets the default of an option; an argument wins over it."""

    memory: str | int = _option("auto", "bytes, '3GB', '2.5GiB' or 'auto': the bound on everything the library keeps")
    context: int = _option(4096, "tokens that keys and values are reserved for", low=1, high=1 << 22)
    dtype: str = _option("auto", "of the residual stream; auto: float32 on CPU, bfloat16 on a GPU", DTYPES)
    kv_bits: int = _option(
        16,
        "of a number in keys and values: 32 float32, 16 bfloat16, 8 codes in groups of 64, at half the bytes",
        (32, 16, 8),
    )
    matmul: str = _option(
        "exact",
        "products of 4-bit weights in a prefill: as in float32, or of numbers rounded to bf16, on a CPU with AMX-BF16",
        ("exact", "bf16"),
    )
    policy: str = _option(MEASURED["policy"], "which expert leaves a full layer", tuple(policy_names()))
    slots: int = _option(0, "slots a layer; 0: as many as memory holds", low=0, high=4096)
    depth: int = _option(MEASURED["depth"], "reads in flight at a time", low=1, high=256)
    parts: int = _option(MEASURED["parts"], "aligned reads that a record is split into", low=1, high=64)
    read_mode: str = _option("cached", "reads through the page cache, or past it", ("cached", "direct"))
    verify: str = _option("first-read", "when a record's SHA-256 is compared", ("off", "first-read", "always"))
    prefill_chunk: int = _option(
        MEASURED["prefill_chunk"],
        "prompt tokens that pass a layer together, rounded to 256; 0: what memory holds",
        # CUDA has at most 65,535 rows of threadgroups, one a token.
        high=1 << 15,
    )
    prefetch: str = _option(
        "off", "reads by a guess at the next layer's experts; ends by itself when steps wait longer for reads", PREFETCH
    )
    backend: str = _option("auto", "implementation of every kernel", ("auto", "native", "gpu", "reference"))
    warm_up: bool = _option(
        False, "compile when loading what a first prompt and its first tokens need, and fill slots meanwhile"
    )
    wire: bool = _option(
        False, "keep slots and resident weights in memory when the machine swaps, where the system allows it"
    )
    stores: str = _option("~/.cache/mlx_ttd", "directory where the store of a hub id OWNER/NAME is OWNER/NAME.ttd")
    idle: float = _option(
        30.0, "seconds after which a stream of which no piece is asked for ends while another call waits", high=86_400
    )
    follow_links: bool = _option(False, "follow links that lead outside the store, as to experts/ on another disk")
    progress: bool = _option(
        True, "a line while weights or a long prompt are read, on a terminal or in a notebook, nowhere else"
    )


def describe_options() -> str:
    """A line per option: name, default, meaning, choices."""
    lines = []
    for f in fields(Options):
        choices = f" ({', '.join(map(str, f.metadata['choices']))})" if f.metadata["choices"] else ""
        lines.append(f"{f.name} = {f.default!r}: {f.metadata['doc']}{choices}")
    return "\n".join(lines)


Options.__doc__ = f"{Options.__doc__}\n\n{describe_options()}\n"


def _convert(name: str, text: str, default: Any) -> Any:
    if isinstance(default, bool):
        if text.lower() not in TRUE + FALSE:
            raise OptionError(f"{PREFIX}{name.upper()}={text!r} is neither true nor false; write 1 or 0.")
        return text.lower() in TRUE
    if isinstance(default, int | float):
        kind, wanted = (int, "an integer") if isinstance(default, int) else (float, "a number")
        try:
            return kind(text)
        except ValueError:
            raise OptionError(f"{PREFIX}{name.upper()}={text!r} is not {wanted}.") from None
    return text


def _check(name: str, value: Any, default: Any, metadata: Mapping[str, Any]) -> None:
    if name == "memory":
        if value != "auto":
            parse_size(value)
        return
    if type(value) is not type(default):
        raise OptionError(f"{name}={value!r} is a {type(value).__name__}; a {type(default).__name__} is needed.")
    if metadata["choices"] and value not in metadata["choices"]:
        raise OptionError(f"{name}={value!r} is unknown; choose one of {', '.join(map(str, metadata['choices']))}.")
    if metadata["high"] and not metadata["low"] <= value <= metadata["high"]:
        raise OptionError(f"{name}={value!r} is out of range: {metadata['low']:,} to {metadata['high']:,}.")


def make_options(given: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Options:
    """Options from arguments over environment over defaults. OptionError for an unknown name or a bad value."""
    known = {f.name: f for f in fields(Options)}
    variables = {key.removeprefix(PREFIX).lower(): text for key, text in environment.items() if key.startswith(PREFIX)}
    variables = {name: text for name, text in variables.items() if name not in NO_OPTIONS}
    for name, shown in [(n, n) for n in given] + [(n, PREFIX + n.upper()) for n in variables]:
        if name not in known:
            raise OptionError(f"option {shown} is unknown; {known_names(name, known, 1)}")
    values = {name: _convert(name, text, known[name].default) for name, text in variables.items()}
    values |= {name: plain_number(value) for name, value in given.items()}
    for name, value in values.items():
        if isinstance(known[name].default, float) and type(value) is int:
            values[name] = float(value)
    for name, value in values.items():
        _check(name, value, known[name].default, known[name].metadata)
    return Options(**values)
