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

log = logging.getLogger("mlx_ttd")
FLOATS = (mx.float32, mx.bfloat16, mx.float16)


def _built_for() -> str:
    """The mlx version that the extension was built for, recorded beside it; empty without an extension."""
    record = Path(__file__).parent.parent / "_native.mlx-version"
    return record.read_text(encoding="ascii").strip() if record.exists() else ""


@cache
def extension() -> ModuleType | None:
    """`mlx_ttd._native`, or None after saying once, where a CPU would have used it, why and what that costs."""
    built, found = _built_for(), importlib.metadata.version("mlx")
    if not built or importlib.util.find_spec("mlx_ttd._native") is None:
        reason = "mlx_ttd was installed without its native part"
    elif built != found:
        reason = f"mlx_ttd's native part was built for mlx {built} and this is mlx {found}"
    else:
        return importlib.import_module("mlx_ttd._native")
    if device_kind() == "cpu":
        log.warning("%s: on this CPU the plain MLX operations serve, tens of times slower; reinstall mlx_ttd.", reason)
    return None


def available(*args: Any) -> bool:
    """Whether the extension is loaded; for operations whose native form takes all arguments."""
    return extension() is not None
