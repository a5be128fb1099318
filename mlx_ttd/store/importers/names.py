"""Source names that Qwen3.5 and Qwen3-Next checkpoints share, and the moves for tensors of more than one layout."""

from __future__ import annotations

from ...spec import ModelSpec, Tensor
from .base import Move, concat, cut, reshape
from .experts import down, gate_up

PATHS = {
    "embedding": "embed_tokens.weight",
    "norm": "norm.weight",
    "head": "lm_head.weight",
    "mtp.fc": "fc.weight",
    "mtp.norm_embedding": "pre_fc_norm_embedding.weight",
    "mtp.norm_hidden": "pre_fc_norm_hidden.weight",
    "mtp.norm": "norm.weight",
    "input_norm": "input_layernorm.weight",
    "post_norm": "post_attention_layernorm.weight",
    "attn.q": "self_attn.q_proj.weight",
    "attn.k": "self_attn.k_proj.weight",
    "attn.v": "self_attn.v_proj.weight",
    "attn.o": "self_attn.o_proj.weight",
    "attn.q_norm": "self_attn.q_norm.weight",
    "attn.k_norm": "self_attn.k_norm.weight",
    "gdn.in_qkv": "linear_attn.in_proj_qkv.weight",
    "gdn.in_z": "linear_attn.in_proj_z.weight",
    "gdn.in_a": "linear_attn.in_proj_a.weight",
    "gdn.in_b": "linear_attn.in_proj_b.weight",
    "gdn.a_log": "linear_attn.A_log",
    "gdn.dt_bias": "linear_attn.dt_bias",
    "gdn.norm": "linear_attn.norm.weight",
    "gdn.out": "linear_attn.out_proj.weight",
    "moe.router": "mlp.gate.weight",
    "shared.gate": "mlp.shared_expert.gate_proj.weight",
    "shared.up": "mlp.shared_expert.up_proj.weight",
    "shared.down": "mlp.shared_expert.down_proj.weight",
    "shared.scale": "mlp.shared_expert_gate.weight",
    "mlp.gate": "mlp.gate_proj.weight",
    "mlp.up": "mlp.up_proj.weight",
    "mlp.down": "mlp.down_proj.weight",
}
CONV = "linear_attn.conv1d.weight"


def _interleaved(spec: ModelSpec, name: str, widths: tuple[int, ...], wanted: tuple[int, ...]) -> Move:
    """Of rows that are, per key head, blocks of `widths` rows: the `wanted` blocks, each over all heads in turn."""
    period = sum(widths)
    shape = (spec.key_heads * period, spec.hidden)
    starts = [sum(widths[:block]) for block in wanted]
    return concat(
        *(
            cut(name, shape, head * period + start, head * period + start + widths[block])
            for block, start in zip(wanted, starts, strict=True)
            for head in range(spec.key_heads)
        )
    )


def _qkvz(spec: ModelSpec, *blocks: int) -> list[Move]:
    values = spec.value_width // spec.key_heads
    return [_interleaved(spec, "linear_attn.in_proj_qkvz.weight", (spec.key_dim, spec.key_dim, values, values), blocks)]


def _ba(spec: ModelSpec, block: int) -> list[Move]:
    heads = spec.value_heads // spec.key_heads
    return [_interleaved(spec, "linear_attn.in_proj_ba.weight", (heads, heads), (block,))]


def _in_qkv(spec: ModelSpec, _: Tensor) -> list[Move]:
    return _qkvz(spec, 0, 1, 2)


def _in_z(spec: ModelSpec, _: Tensor) -> list[Move]:
    return _qkvz(spec, 3)


def _in_b(spec: ModelSpec, _: Tensor) -> list[Move]:
    return _ba(spec, 0)


def _in_a(spec: ModelSpec, _: Tensor) -> list[Move]:
    return _ba(spec, 1)


def _conv(_: ModelSpec, tensor: Tensor) -> list[Move]:
    """torch's [C, 1, kernel], or MLX's [C, kernel, 1]."""
    channels, kernel = tensor.shape
    return [reshape(CONV, shape, tensor.shape) for shape in ((channels, 1, kernel), (channels, kernel, 1))]


MOVES = {
    "gdn.in_qkv": _in_qkv,
    "gdn.in_z": _in_z,
    "gdn.in_b": _in_b,
    "gdn.in_a": _in_a,
    "gdn.conv": _conv,
    "moe.gate_up": gate_up,
    "moe.down": down,
}
