"""What an MLX config declares about quantisation, per module path whatever its prefix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointError
from ..spec import Quantisation

ROOTS = ("mtp.", "layers.", "embed_tokens", "lm_head")


def canonical(path: str) -> str:
    """A module path from its first known component on: 'model.layers.0.mlp.gate' -> 'layers.0.mlp.gate'."""
    starts = [i for i in range(len(path)) if (i == 0 or path[i - 1] == ".") and path.startswith(ROOTS, i)]
    return path[starts[0] :] if starts else path


def declared(config: Mapping[str, Any]) -> tuple[Mapping[str, Any] | None, dict[str, Any]]:
    """The default quantisation of a config and its overrides by canonical module path. Raises CheckpointError.

    mlx-lm writes it twice, as quantization and, for others to see, as quantization_config: they must say the same.
    """
    both = [_declared(config, name) for name in ("quantization", "quantization_config")]
    said = [found for found in both if found is not None]
    if len(said) == 2 and said[0] != said[1]:
        raise CheckpointError(
            "config.json: quantization and quantization_config contradict each other; leave the one that is right."
        )
    return said[0] if said else (None, {})


def _declared(config: Mapping[str, Any], name: str) -> tuple[Mapping[str, Any], dict[str, Any]] | None:
    fields = config.get(name)
    if fields is None or (isinstance(fields, dict) and "quant_method" in fields):
        return None
    if not isinstance(fields, dict) or type(fields.get("bits")) is not int or type(fields.get("group_size")) is not int:
        raise CheckpointError(
            f"config.json: {name} needs integer bits and group_size, and one object per overridden module."
        )
    overrides: dict[str, Any] = {}
    for path, value in fields.items():
        if isinstance(value, dict | bool) and overrides.setdefault(canonical(path), value) != value:
            raise CheckpointError(
                f"config.json: {name} says both {overrides[canonical(path)]} and {value} of {canonical(path)}; "
                "leave the one that is right."
            )
    return {key: value for key, value in fields.items() if not isinstance(value, dict | bool)}, overrides


def unpacked(config: Mapping[str, Any], module: str) -> str | None:
    """How the config contradicts a module that the checkpoint holds unpacked, or None."""
    said = declared(config)[1].get(canonical(module))
    return f"{module} is not packed where config.json says that it is" if isinstance(said, dict) else None


def contradiction(config: Mapping[str, Any], module: str, found: Quantisation) -> str | None:
    """How the config contradicts the packed module that the checkpoint holds, or None."""
    default, overrides = declared(config)
    said = overrides.get(canonical(module), default)
    if said is None or said is True:
        return None
    if said is False:
        return f"{module} is packed where config.json says that it is not"
    mode = said.get("mode", "affine")
    if (said.get("bits"), said.get("group_size"), mode) == (found.bits, found.group, found.mode):
        return None
    return (
        f"{module} has {found.bits} bits in groups of {found.group} ({found.mode}) where config.json says "
        f"{said.get('bits')} in groups of {said.get('group_size')} ({mode})"
    )
