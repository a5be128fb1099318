"""Checkpoints written by mlx-lm, quantised or not: stacked experts, conv [C, kernel, 1], norms 1 + w."""

from __future__ import annotations

from ...spec import ModelSpec, Tensor
from ..checkpoint import Checkpoint
from .base import Importer, Move, concat, cut, reshape, take
from .names import CONV, INTERLEAVED, PATHS


def _gate_up(spec: ModelSpec, _: Tensor) -> list[Move]:
    shape, rows = (spec.experts, spec.inter, spec.hidden), spec.inter
    stacked = [f"mlp.switch_mlp.{part}_proj.weight" for part in ("gate", "up")]
    return [concat(*(cut(name, shape, e * rows, (e + 1) * rows) for e in range(spec.experts) for name in stacked))]


def _down(_: ModelSpec, tensor: Tensor) -> list[Move]:
    return [take("mlp.switch_mlp.down_proj.weight", tensor.shape)]


def _conv(_: ModelSpec, tensor: Tensor) -> list[Move]:
    return [reshape(CONV, (*tensor.shape, 1), tensor.shape)]


def _recognises(checkpoint: Checkpoint) -> bool:
    convs = [info for name, info in checkpoint.tensors.items() if name.endswith(CONV)]
    return any(len(info.shape) == 3 and info.shape[2] == 1 for info in convs) or (
        not convs and "quantization" in checkpoint.config
    )


MLX = Importer(
    "mlx", _recognises, "1+w", PATHS, {**INTERLEAVED, "gdn.conv": _conv, "moe.gate_up": _gate_up, "moe.down": _down}
)
