"""What `import mlx_ttd` offers: load a store and run it, describe, verify, convert and trace one."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import mlx.core as mx

from . import kernels
from .allocation import divide_budget
from .errors import BudgetError, OptionError
from .observe import Recorder, Trace, make_trace_folder, probing
from .open_models import close_open, note_open
from .options import make_options
from .progress_line import interactive
from .prompts import Prompt
from .session.llm import LLM
from .stats import Stats
from .store import VerifyReport, convert, open_store
from .store import info as store_info
from .store import verify as verify_store
from .store_paths import demo_path, store_path

__all__ = ["LLM", "Prompt", "Stats", "convert", "demo_path", "info", "load", "store_path", "trace", "verify"]


def info(store: str | os.PathLike[str], **options: Any) -> dict[str, Any]:
    """What a store holds and costs, in bytes, without loading it; `least_bytes` is the smallest budget that runs."""
    chosen = make_options(options)
    opened = open_store(store_path(store, chosen), chosen.follow_links)
    context = min(chosen.context, opened.spec.max_context)
    try:
        least = divide_budget(opened, changed(chosen, memory=1 << 49), context).least
    except BudgetError as error:
        least = error.least_bytes or 0
    return store_info(opened.path, chosen.follow_links) | {"context": context, "least_bytes": least}


def verify(
    store: str | os.PathLike[str],
    threads: int | None = None,
    progress: Callable[..., None] | None = None,
    **options: Any,
) -> VerifyReport:
    """Compare every byte of a store with the digests in its manifest; the error lists what is damaged.

    `options` are those of `load`; `stores` and `follow_links` are of use.
    """
    chosen = make_options(options)
    return verify_store(store_path(store, chosen), threads, progress, chosen.follow_links)


def trace(store: str | os.PathLike[str], prompt: Prompt, folder: str | os.PathLike[str], **options: Any) -> Trace:
    """Pass `prompt` through a store token by token, write every layer's doing to `folder`, and return it.

    `options` are those of `load`. See mlx_ttd.observe.trace for the format.
    """
    make_trace_folder(Path(folder))
    with load(store, replace=False, **options) as llm:
        tokens = llm.encode(prompt)
        cache = llm.model.make_cache()
        recorder = Recorder()
        with probing(recorder):
            for token in tokens:
                mx.eval(llm.model(mx.array([[token]]), cache=cache))
        found = recorder.trace("mlx_ttd", llm.store.digest, tokens, len(llm.store.spec.layer_types))
    found.save(Path(folder))
    return found


def load(
    path_or_id: str | os.PathLike[str],
    memory: str | int = "auto",
    *,
    share: LLM | None = None,
    replace: bool | None = None,
    **options: Any,
) -> LLM:
    """Load a store under a memory budget.

    path_or_id: a *.ttd directory, "demo" for the bundled model, or a hub id whose store is in the option `stores`.
    memory: bytes, "3GB" (10^9), "2.5GiB" (2^30) or "auto", a hard bound on everything the library keeps. share: a
    model whose budget and reading threads this one uses too; it gets what that one leaves. replace: close the open
    models of the same store first; None does so in IPython and Jupyter, where a cell is run again. The other options
    are those of `Options`; MLX_TTD_<NAME> mirrors each. Raises StoreError, BudgetError (naming the least budget that
    works), OptionError.
    """
    for name, value, kind in (("share", share, LLM), ("replace", replace, bool)):
        if value is not None and not isinstance(value, kind):
            raise OptionError(f"{name}={value!r} is a {type(value).__name__}; {kind.__name__} or None is needed.")
    if share is not None and memory != "auto":
        raise OptionError("memory= and share= exclude each other: the budget is that of the model to share with.")
    chosen = make_options({"memory": memory, **options} if memory != "auto" else options)
    store = open_store(store_path(path_or_id, chosen), chosen.follow_links)
    if interactive() if replace is None else replace:
        close_open(store.path, keep=share)
    forced = kernels.forced_kind()
    try:
        return note_open(LLM(store, chosen, share))
    except BaseException as error:
        kernels.set_backend(forced)
        if share is None or not isinstance(error, BudgetError):
            raise
        raise BudgetError(
            f"{store.path} needs at least {error.least_bytes or 0:,} bytes and {share.store.path} leaves "
            f"{max(0, share.ledger.free):,} of {share.ledger.total:,}; give that one fewer slots= or more memory=.",
            least_bytes=error.least_bytes,
        ) from None
