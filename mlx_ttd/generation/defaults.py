"""What a model's makers recommend for generation, and the ids by which they say that a text ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..spec import read_json, require_regular, text_config, user_path

CONFIG, GENERATION = "config.json", "generation_config.json"


@dataclass(frozen=True)
class GenerationDefaults:
    """Sampling numbers as `make_sampler` and `make_processors` take them; eos_ids end a generation."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    eos_ids: tuple[int, ...] = ()


def read_generation_defaults(directory: str | Path) -> GenerationDefaults:
    """The defaults in `directory`, greedy without a generation_config.json; ConfigError names a field that is wrong."""
    folder = user_path(directory)
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no directory, or is not there any more; name one, or load the model again.")
    path = folder / GENERATION
    require_regular(path, ConfigError)
    if not path.exists():
        return GenerationDefaults()
    data = read_json(path)
    samples = data.get("do_sample", "temperature" in data)
    return GenerationDefaults(
        temperature=_number(data, path, "temperature", 1.0, 0, 100) if samples else 0.0,
        top_k=int(_number(data, path, "top_k", 0, 0, 1 << 31)),
        top_p=_number(data, path, "top_p", 1.0, 0, 1) or 1.0,
        min_p=_number(data, path, "min_p", 0.0, 0, 1),
        repetition_penalty=_number(data, path, "repetition_penalty", 1.0, 1e-3, 1e3),
        eos_ids=_eos(data, path),
    )


def read_eos_ids(directory: str | Path) -> frozenset[int]:
    """Every id that config.json, its text_config or generation_config.json names as the end of a text."""
    path = user_path(directory) / CONFIG
    found = set(read_generation_defaults(directory).eos_ids)
    require_regular(path, ConfigError)
    if path.exists():
        config = read_json(path)
        found.update(_eos(config, path), _eos(text_config(config, str(path)), path))
    return frozenset(found)


def _eos(data: Mapping[str, Any], path: Path) -> tuple[int, ...]:
    found = data.get("eos_token_id")
    listed = [] if found is None else found if isinstance(found, list) else [found]
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in listed):
        raise ConfigError(f"{path}: eos_token_id is {found!r}; a token id or a list of them is needed.")
    return tuple(listed)


def _number(data: Mapping[str, Any], path: Path, name: str, default: float, low: float, high: float) -> float:
    value = data.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ConfigError(f"{path}: {name} is {value!r}; a number from {low:g} to {high:g} is needed.")
    return value
