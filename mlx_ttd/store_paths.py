"""Where the store lies that a path, a hub id or "demo" means."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path
from shlex import quote

from .errors import OptionError, StoreError
from .options import Options, make_options
from .spec import user_path
from .store import hub_bytes, is_hub_id, refuse_file


def demo_path() -> Path:
    """The bundled demo store: a small Qwen3.5-MoE trained on the King James Bible."""
    return Path(str(resources.files("mlx_ttd") / "demo" / "store"))


def store_name(path: Path) -> str:
    """What a store is called for people."""
    return "demo" if path == demo_path() else path.name.removesuffix(".ttd")


def store_path(path_or_id: str | os.PathLike[str], options: Options | None = None) -> Path:
    """The store directory that a path, a hub id or "demo" means. StoreError says how to make one.

    The store of the hub id OWNER/NAME is the directory OWNER/NAME.ttd in the option `stores`, unless OWNER/NAME
    itself is a directory.
    """
    if path_or_id == "demo":
        return demo_path()
    if not isinstance(path_or_id, str | os.PathLike):
        raise OptionError(f"a store is named by a path, a hub id or 'demo', not by a {type(path_or_id).__name__}.")
    path = user_path(path_or_id)
    held = [name for name in ("manifest.json", "config.json") if _there(path / name)]
    if "manifest.json" in held:
        return path
    if held:
        hint = f"mlx-ttd convert {quote(str(path))} {quote(path.name + '.ttd')}"
        raise StoreError(f"{path} is a checkpoint, not a store; make one with `{hint}`.")
    if is_hub_id(path_or_id):
        return _hub_store(str(path_or_id), options or make_options({}))
    refuse_file(path)
    raise StoreError(f"{path} is not a store: it has no manifest.json; name a *.ttd directory, or 'demo'.")


def _there(path: Path) -> bool:
    """Whether anything lies at a path. StoreError where the system does not tell."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise StoreError(f"{path} cannot be looked at: {error.strerror}; name a *.ttd directory, or 'demo'.") from None
    return True


def _hub_store(name: str, options: Options) -> Path:
    path = user_path(options.stores) / f"{name}.ttd"
    if _there(path / "manifest.json"):
        return path
    size = hub_bytes(name)
    cost = "" if size is None else f", which downloads {size / 1e9:.2f} GB"
    raise StoreError(
        f"{name} is no directory here, and there is no store of that hub id at {path}; "
        f"make it with `mlx-ttd convert {name} {quote(str(path))}`{cost}."
    )
