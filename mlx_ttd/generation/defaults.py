"""What a model's makers recommend for generation: generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..spec import read_json, require_regular, user_path


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
    path = folder / "generation_config.json"
    require_regular(path, ConfigError)
    if not path.exists():
        return GenerationDefaults()
    data = read_json(path)
    eos = data.get("eos_token_id")
    eos = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in eos):
        raise ConfigError(f"{path}: eos_token_id is {data['eos_token_id']!r}; a token id or a list of them is needed.")
    samples = data.get("do_sample", "temperature" in data)
    return GenerationDefaults(
        temperature=_number(data, path, "temperature", 1.0, 0, 100) if samples else 0.0,
        top_k=int(_number(data, path, "top_k", 0, 0, 1 << 31)),
        top_p=_number(data, path, "top_p", 1.0, 0, 1) or 1.0,
        min_p=_number(data, path, "min_p", 0.0, 0, 1),
        repetition_penalty=_number(data, path, "repetition_penalty", 1.0, 1e-3, 1e3),
        eos_ids=tuple(eos),
    )


def _number(data: Mapping[str, Any], path: Path, name: str, default: float, low: float, high: float) -> float:
    value = data.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ConfigError(f"{path}: {name} is {value!r}; a number from {low:g} to {high:g} is needed.")
    return value
