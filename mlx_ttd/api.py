"""What `import mlx_ttd` offers: load a store and run it, describe, verify, convert and trace one."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import mlx.core as mx

from .allocation import divide_budget
from .errors import BudgetError, StoreError
from .llm import LLM, Prompt, Stats
from .observe import Recorder, Trace, probing
from .options import make_options
from .store import VerifyReport, convert, open_store
from .store import info as store_info
from .store import verify as verify_store

__all__ = ["LLM", "Prompt", "Stats", "convert", "demo_path", "info", "load", "store_path", "trace", "verify"]


def demo_path() -> Path:
    """The bundled demo store: a small Qwen3.5-MoE trained on the King James Bible."""
    return Path(str(resources.files("mlx_ttd") / "demo" / "store"))


def store_path(path_or_id: str | os.PathLike[str]) -> Path:
    """The store directory that `path_or_id` means; "demo" is the bundled one. StoreError says how to make one."""
    if path_or_id == "demo":
        return demo_path()
    path = Path(path_or_id)
    if (path / "manifest.json").is_file():
        return path
    if (path / "config.json").is_file():
        hint = f"mlx-ttd convert {path} {path.name}.ttd"
        raise StoreError(f"{path} is a checkpoint, not a store; make one with `{hint}`.")
    raise StoreError(f"{path} is not a store: it has no manifest.json; name a *.ttd directory, or 'demo'.")


def info(store: str | os.PathLike[str], **options: Any) -> dict[str, Any]:
    """What a store holds and costs, in bytes, without loading it; `least_bytes` is the smallest budget that runs."""
    opened = open_store(store_path(store))
    chosen = make_options(options)
    context = min(chosen.context, opened.spec.max_context)
    try:
        least = divide_budget(opened, replace(chosen, memory=1 << 49), context).least
    except BudgetError as error:
        least = error.least_bytes or 0
    return store_info(opened.path) | {"context": context, "least_bytes": least}


def verify(
    store: str | os.PathLike[str], threads: int | None = None, progress: Callable[..., None] | None = None
) -> VerifyReport:
    """Compare every byte of a store with the digests in its manifest; the error lists what is damaged."""
    return verify_store(store_path(store), threads, progress)


def trace(store: str | os.PathLike[str], prompt: Prompt, folder: str | os.PathLike[str], **options: Any) -> Trace:
    """Pass `prompt` through a store token by token, write every layer's doing to `folder`, and return it.

    `options` are those of `load`. See mlx_ttd.observe.trace for the format.
    """
    with load(store, **options) as llm:
        tokens = llm.encode(prompt)
        cache = llm.model.make_cache()
        recorder = Recorder()
        with probing(recorder):
            for token in tokens:
                mx.eval(llm.model(mx.array([[token]]), cache=cache))
        found = recorder.trace("mlx_ttd", llm.store.digest, tokens, len(llm.store.spec.layer_types))
    found.save(Path(folder))
    return found


def load(path_or_id: str | os.PathLike[str], memory: str | int = "auto", **options: Any) -> LLM:
    """Load a store under a memory budget.

    path_or_id: a *.ttd directory, or "demo" for the bundled model. memory: bytes, "3GB" (10^9), "2.5GiB" (2^30) or
    "auto", a hard bound on everything the library keeps. The other options are those of `Options`; MLX_TTD_<NAME>
    mirrors each. Raises StoreError, BudgetError (naming the least budget that works), OptionError.
    """
    given = {"memory": memory, **options} if memory != "auto" else options
    return LLM(open_store(store_path(path_or_id)), make_options(given))
