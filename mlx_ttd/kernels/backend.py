"""Which implementation of an operation runs: native on CPU, GPU text on Metal and CUDA, else the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx

from ..errors import KernelError

Kind = Literal["reference", "native", "gpu"]
Mode = Literal["decode", "verify", "prefill"]
ORDER: dict[str, tuple[Kind, ...]] = {
    "cpu": ("native", "reference"),
    "metal": ("gpu", "reference"),
    "cuda": ("gpu", "reference"),
}


@dataclass(frozen=True)
class Variant:
    call: Callable[..., Any]
    supports: Callable[..., bool]


_variants: dict[str, dict[Kind, Variant]] = {}
_forced: Kind | None = None
used: dict[str, Kind] = {}


def device_kind() -> Literal["cpu", "metal", "cuda"]:
    """What MLX's default device is."""
    if mx.default_device().type == mx.DeviceType.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def always(*args: Any, **kwargs: Any) -> bool:
    return True


def register(op: str, kind: Kind, call: Callable[..., Any], supports: Callable[..., bool] = always) -> None:
    """Offer `call` as the `kind` implementation of `op`; it is asked for arguments that `supports` accepts."""
    _variants.setdefault(op, {})[kind] = Variant(call, supports)


def _kinds(op: str) -> tuple[Kind, ...]:
    """Implementations of `op` in the order asked. A reference stands in for a forced kind that `op` never has."""
    if _forced is None:
        return ORDER[device_kind()]
    return (_forced if _forced in _variants[op] else "reference",)


def run(op: str, *args: Any) -> Any:
    """Call the first implementation of `op` that supports `args`, and note in `used` which it was."""
    for kind in _kinds(op):
        variant = _variants[op].get(kind)
        if variant is not None and variant.supports(*args):
            used[op] = kind
            return variant.call(*args)
    raise KernelError(f"{op} has no {_forced} implementation for these arguments; force none to let it choose.")


def chosen(op: str) -> Kind:
    """The implementation of `op` that is asked first on this machine."""
    return next((kind for kind in _kinds(op) if kind in _variants[op]), "reference")


def forced_kind() -> Kind | None:
    """What `set_backend` was last told."""
    return _forced


def set_backend(kind: Kind | None) -> None:
    """Force one implementation for every operation (None: choose). KernelError at the call that lacks it."""
    global _forced
    _forced = kind


@contextmanager
def forced(kind: Kind | None) -> Iterator[None]:
    """`set_backend` for the length of a with block."""
    before = _forced
    set_backend(kind)
    try:
        yield
    finally:
        set_backend(before)
