"""The tensors of a model by role: canonical name, shape and kind. The store, the importers and the modules share it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .model_spec import FULL, ModelSpec

Kind = Literal["matrix", "norm", "plain_norm", "vector", "conv", "experts"]


@dataclass(frozen=True)
class Tensor:
    """One tensor the model needs: `name` in the store ('layers.3.attn.q'), `role` without the layer ('attn.q')."""

    name: str
    role: str
    shape: tuple[int, ...]
    kind: Kind
    layer: int | None = None


def _shapes(spec: ModelSpec, layer_type: str) -> dict[str, tuple[tuple[int, ...], Kind]]:
    h, hd, conv = spec.hidden, spec.head_dim, spec.conv_width
    table: dict[str, tuple[tuple[int, ...], Kind]] = {"input_norm": ((h,), "norm"), "post_norm": ((h,), "norm")}
    if layer_type == FULL:
        table |= {
            "attn.q": ((spec.heads * hd * 2, h), "matrix"),
            "attn.k": ((spec.kv_heads * hd, h), "matrix"),
            "attn.v": ((spec.kv_heads * hd, h), "matrix"),
            "attn.o": ((h, spec.heads * hd), "matrix"),
            "attn.q_norm": ((hd,), "norm"),
            "attn.k_norm": ((hd,), "norm"),
        }
    else:
        table |= {
            "gdn.in_qkv": ((conv, h), "matrix"),
            "gdn.in_z": ((spec.value_width, h), "matrix"),
            "gdn.in_a": ((spec.value_heads, h), "matrix"),
            "gdn.in_b": ((spec.value_heads, h), "matrix"),
            "gdn.conv": ((conv, spec.conv), "conv"),
            "gdn.a_log": ((spec.value_heads,), "vector"),
            "gdn.dt_bias": ((spec.value_heads,), "vector"),
            "gdn.norm": ((spec.value_dim,), "plain_norm"),
            "gdn.out": ((h, spec.value_width), "matrix"),
        }
    if spec.is_moe:
        table |= {
            "moe.router": ((spec.experts, h), "matrix"),
            "moe.gate_up": ((spec.experts, 2 * spec.inter, h), "experts"),
            "moe.down": ((spec.experts, h, spec.inter), "experts"),
            "shared.gate": ((spec.shared_inter, h), "matrix"),
            "shared.up": ((spec.shared_inter, h), "matrix"),
            "shared.down": ((h, spec.shared_inter), "matrix"),
            "shared.scale": ((1, h), "matrix"),
        }
    else:
        table |= {
            "mlp.gate": ((spec.inter, h), "matrix"),
            "mlp.up": ((spec.inter, h), "matrix"),
            "mlp.down": ((h, spec.inter), "matrix"),
        }
    return table


def layer_tensors(spec: ModelSpec, prefix: str, layer_type: str, layer: int) -> list[Tensor]:
    """The tensors of one decoder layer, named `prefix` + role."""
    table = _shapes(spec, layer_type).items()
    return [Tensor(prefix + role, role, shape, kind, layer) for role, (shape, kind) in table]


def trunk_tensors(spec: ModelSpec) -> list[Tensor]:
    """Every tensor of the language model without its MTP layer, in a fixed order. A tied head is left out."""
    tensors = [Tensor("embedding", "embedding", (spec.vocab, spec.hidden), "matrix")]
    for i, layer_type in enumerate(spec.layer_types):
        tensors += layer_tensors(spec, f"layers.{i}.", layer_type, i)
    tensors.append(Tensor("norm", "norm", (spec.hidden,), "norm"))
    if not spec.tied:
        tensors.append(Tensor("head", "head", (spec.vocab, spec.hidden), "matrix"))
    return tensors


def mtp_tensors(spec: ModelSpec) -> list[Tensor]:
    """The tensors of the multi-token-prediction layer: a full-attention layer plus its joining projection."""
    h = spec.hidden
    return [
        Tensor("mtp.fc", "mtp.fc", (h, 2 * h), "matrix"),
        Tensor("mtp.norm_embedding", "mtp.norm_embedding", (h,), "norm"),
        Tensor("mtp.norm_hidden", "mtp.norm_hidden", (h,), "norm"),
        Tensor("mtp.norm", "mtp.norm", (h,), "norm"),
        *layer_tensors(spec, "mtp.layers.0.", FULL, 0),
    ]
