"""The native extension, if it can be used here: it serves the one mlx it was built for, whose C++ ABI is not stable."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx

from .backend import device_kind
from .first_use import first_use

log = logging.getLogger("mlx_ttd")
FLOATS = (mx.float32, mx.bfloat16, mx.float16)


def _built_for() -> str:
    """The mlx version that the extension was built for, recorded beside it; empty without an extension."""
    found = importlib.util.find_spec("mlx_ttd._native")
    if found is None or found.origin is None:
        return ""
    record = Path(found.origin).with_name("_native.mlx-version")
    return record.read_text(encoding="ascii").strip() if record.exists() else ""


def _missing() -> str | None:
    """Why the extension cannot serve here, None where it can."""
    built, found = _built_for(), importlib.metadata.version("mlx")
    if not built:
        return "mlx_ttd was installed without its native part"
    return None if built == found else f"mlx_ttd's native part was built for mlx {built} and this is mlx {found}"


@cache
def extension() -> ModuleType | None:
    """`mlx_ttd._native`, or None after saying once, where a CPU would have used it, why and what that costs."""
    reason = _missing()
    if reason is None:
        with first_use("native"):
            return importlib.import_module("mlx_ttd._native")
    if device_kind() == "cpu":
        log.warning("%s: on this CPU the plain MLX operations serve, tens of times slower; reinstall mlx_ttd.", reason)
    return None


def native_status() -> str:
    """One phrase for a bug report: instruction set and threads in use, or why there is no native part."""
    reason = _missing()
    if reason is not None:
        return f"none: {reason}"
    native: Any = extension()
    return f"{native.isa()}, {native.threads()} threads"


def available(*args: Any) -> bool:
    """Whether the extension is loaded; for operations whose native form takes all arguments."""
    return extension() is not None
