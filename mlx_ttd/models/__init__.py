"""One file per model_type, and the registry that finds it."""

from ..errors import ConfigError
from .decoder_layer import blocks
from .mtp import MTPLayer
from .qwen3_5 import Model

MODELS = {"qwen3_5": Model, "qwen3_5_moe": Model, "qwen3_next": Model}


def model_class(model_type: str) -> type[Model]:
    """The module class of a `ModelSpec.model_type`. ConfigError for one that has none."""
    if model_type not in MODELS:
        raise ConfigError(f"model_type {model_type!r} has no model here; supported are {', '.join(sorted(MODELS))}.")
    return MODELS[model_type]


__all__ = ["MODELS", "MTPLayer", "Model", "blocks", "model_class"]
