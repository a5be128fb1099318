"""The experts' matrices in the three layouts that occur: fused, each expert's own, and stacked as mlx-lm does."""

from __future__ import annotations

from ...spec import ModelSpec, Tensor
from .base import Move, concat, cut, take


def gate_up(spec: ModelSpec, tensor: Tensor) -> list[Move]:
    """Fused [E, 2I, H], or gate rows then up rows of each expert's two or of two stacks [E, I, H]."""
    own, stack, rows = (spec.inter, spec.hidden), (spec.experts, spec.inter, spec.hidden), spec.inter
    each = [take(f"mlp.experts.{e}.{part}_proj.weight", own) for e in range(spec.experts) for part in ("gate", "up")]
    stacks = [f"mlp.switch_mlp.{part}_proj.weight" for part in ("gate", "up")]
    stacked = [cut(name, stack, e * rows, (e + 1) * rows) for e in range(spec.experts) for name in stacks]
    return [take("mlp.experts.gate_up_proj", tensor.shape), concat(*each), concat(*stacked)]


def down(spec: ModelSpec, tensor: Tensor) -> list[Move]:
    """Fused or stacked [E, H, I], or one tensor per expert."""
    own = [take(f"mlp.experts.{e}.down_proj.weight", (spec.hidden, spec.inter)) for e in range(spec.experts)]
    return [
        take("mlp.experts.down_proj", tensor.shape),
        concat(*own),
        take("mlp.switch_mlp.down_proj.weight", tensor.shape),
    ]
