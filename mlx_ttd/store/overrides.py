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
    """The default quantisation of a config and its overrides by canonical module path. Raises CheckpointError."""
    fields = config.get("quantization")
    if fields is None:
        return None, {}
    if not isinstance(fields, dict) or type(fields.get("bits")) is not int or type(fields.get("group_size")) is not int:
        raise CheckpointError(
            "config.json: quantization needs integer bits and group_size, and one object per overridden module."
        )
    return fields, {canonical(path): value for path, value in fields.items() if isinstance(value, dict | bool)}


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
