"""Hugging Face checkpoints in bf16, f16 or f32, experts fused in one tensor or each in its own."""

from __future__ import annotations

from ...spec import ModelSpec, Tensor
from ..checkpoint import Checkpoint
from .base import Importer, Move, concat, reshape, take
from .names import CONV, INTERLEAVED, PATHS


def gate_up(spec: ModelSpec, tensor: Tensor) -> list[Move]:
    """Fused [E, 2I, H], or per expert gate rows then up rows."""
    shape = (spec.inter, spec.hidden)
    own = [take(f"mlp.experts.{e}.{part}_proj.weight", shape) for e in range(spec.experts) for part in ("gate", "up")]
    return [take("mlp.experts.gate_up_proj", tensor.shape), concat(*own)]


def down(spec: ModelSpec, tensor: Tensor) -> list[Move]:
    """Fused [E, H, I], or one tensor per expert."""
    own = [take(f"mlp.experts.{e}.down_proj.weight", (spec.hidden, spec.inter)) for e in range(spec.experts)]
    return [take("mlp.experts.down_proj", tensor.shape), concat(*own)]


def conv(_: ModelSpec, tensor: Tensor) -> list[Move]:
    """torch's [C, 1, kernel]."""
    channels, kernel = tensor.shape
    return [reshape(CONV, (channels, 1, kernel), tensor.shape)]


def _recognises(_: Checkpoint) -> bool:
    return True


HF = Importer(
    "hf", _recognises, "w", PATHS, {**INTERLEAVED, "gdn.conv": conv, "moe.gate_up": gate_up, "moe.down": down}
)
