"""What a model is, read from its config.json: shapes and conventions, no arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, OptionError

LINEAR, FULL = "linear_attention", "full_attention"
# What the configuration classes of qwen3_5, qwen3_5_moe and qwen3_next in transformers take for absent keys.
ROPE_THETA, MAX_CONTEXT = 1e4, 32_768
MOE_TYPES = {"qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next"}
DENSE_TYPES = {"qwen3_5", "qwen3_5_text"}
# What "mrope" adds concerns images alone.
PLAIN_ROPES = ("default", "mrope")
SILU = ("silu", "swish")


@dataclass(frozen=True)
class ModelSpec:
    """Shapes of a hybrid (gated DeltaNet + gated attention) language model; sizes are element counts."""

    model_type: str
    hidden: int
    vocab: int
    layer_types: tuple[str, ...]
    eps: float
    heads: int
    kv_heads: int
    head_dim: int
    rope_dim: int
    rope_theta: float
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int
    experts: int
    top_k: int
    inter: int
    shared_inter: int
    tied: bool
    max_context: int
    mtp_layers: int

    @property
    def is_moe(self) -> bool:
        return self.experts > 0

    @property
    def key_width(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def conv_width(self) -> int:
        return 2 * self.key_width + self.value_width

    @property
    def kv_group(self) -> int:
        """Numbers of a head that share a scale where keys and values are 8-bit codes. OptionError where none fits."""
        for group in (64, 32):
            if self.head_dim % group == 0:
                return group
        raise OptionError(f"kv_bits=8 needs a head_dim of a multiple of 32, not {self.head_dim}; choose kv_bits=16.")

    def kv_bytes_per_token(self, bits: int) -> int:
        """Bytes that one position adds to the keys and values of all full-attention layers, of 32, 16 or 8 bits each.

        Codes of 8 bits have a bf16 scale and bias for each group.
        """
        scales = 4 * self.head_dim // self.kv_group if bits == 8 else 0
        return 2 * self.layer_types.count(FULL) * self.kv_heads * (self.head_dim * bits // 8 + scales)

    def recurrent_bytes(self, itemsize: int) -> int:
        """Bytes of conv tails and f32 recurrent state of all GDN layers, whatever the length."""
        layer = (self.conv - 1) * self.conv_width * itemsize + self.value_heads * self.key_dim * self.value_dim * 4
        return self.layer_types.count(LINEAR) * layer


class _Fields:
    """Typed access to a config whose fields are untrusted."""

    def __init__(self, data: Mapping[str, Any], where: str):
        self.data, self.where = data, where

    def integer(self, name: str, default: int | None = None, low: int = 1, high: int = 1 << 31) -> int:
        value = self.data.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ConfigError(f"{self.where}: {name} is {value!r}; an integer from {low} to {high} is needed.")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.data.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
            raise ConfigError(f"{self.where}: {name} is {value!r}; a positive number is needed.")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.data.get(name, False)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.where}: {name} is {value!r}; true or false is needed.")
        return value


def _layer_types(fields: _Fields, layers: int) -> tuple[str, ...]:
    listed = fields.data.get("layer_types")
    if listed is None:
        interval = fields.integer("full_attention_interval", 4)
        return tuple(FULL if i % interval == interval - 1 else LINEAR for i in range(layers))
    if not isinstance(listed, list) or len(listed) != layers or any(t not in (LINEAR, FULL) for t in listed):
        raise ConfigError(f"{fields.where}: layer_types must list '{LINEAR}' or '{FULL}' for each of {layers} layers.")
    return tuple(listed)


def text_config(config: Mapping[str, Any], where: str = "config.json") -> dict[str, Any]:
    """The language model's own fields, whether they sit in `text_config` or at the top level.

    tie_word_embeddings of `text_config` wins, as in transformers' language models; the one outside, which transformers
    ties image models by, counts where that is silent.
    """
    inner = config.get("text_config")
    if inner is None:
        return dict(config)
    if not isinstance(inner, dict):
        raise ConfigError(f"{where}: text_config is a {type(inner).__name__} where an object is needed.")
    return {"tie_word_embeddings": config.get("tie_word_embeddings", False), **inner}


def _rope(text: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields of the rotary embedding, whether they sit in an object of their own or at the top level."""
    nested = {name: text[name] for name in ("rope_parameters", "rope_scaling") if text.get(name)}
    for name, rope in nested.items():
        if not isinstance(rope, dict):
            raise ConfigError(f"{where}: {name} is a {type(rope).__name__} where an object is needed.")
    kinds = [text.get("rope_type"), *(rope.get(key) for rope in nested.values() for key in ("rope_type", "type"))]
    for kind in kinds:
        if kind is not None and kind not in PLAIN_ROPES:
            raise ConfigError(
                f"{where}: RoPE of type {kind!r} is not supported, only 'default' is; "
                "use the model with the config of its native context."
            )
    for name in ("rope_theta", "partial_rotary_factor"):
        said = {rope[name] for rope in nested.values() if isinstance(rope.get(name), int | float)}
        if len(said) > 1:
            raise ConfigError(
                f"{where}: rope_parameters and rope_scaling disagree on {name}; leave the one that is right."
            )
    return {**text, **{key: value for rope in reversed(nested.values()) for key, value in rope.items()}}


def model_spec(config: Mapping[str, Any], where: str = "config.json") -> ModelSpec:
    """Read a `ModelSpec` from a Hugging Face or MLX config, nested or flat. Raises ConfigError."""
    text = text_config(config, where)
    model_type = text.get("model_type", config.get("model_type"))
    if not isinstance(model_type, str) or model_type not in MOE_TYPES | DENSE_TYPES:
        known = ", ".join(sorted(MOE_TYPES | DENSE_TYPES))
        raise ConfigError(f"{where}: model_type {model_type!r} is not supported; supported are {known}.")
    if (
        text.get("mlp_only_layers")
        or text.get("decoder_sparse_step", 1) != 1
        or text.get("norm_topk_prob", True) is not True
    ):
        raise ConfigError(
            f"{where}: layers without experts among layers with them, or weights of chosen experts that are "
            "not renormalised, are not supported."
        )
    if text.get("hidden_act") is not None and text["hidden_act"] not in SILU:
        raise ConfigError(
            f"{where}: hidden_act is {text['hidden_act']!r}, and only 'silu' is supported; use a model with that."
        )
    moe = model_type in MOE_TYPES
    fields = _Fields(text, where)
    layers = fields.integer("num_hidden_layers", high=4096)
    rope_fields = _Fields(_rope(text, where), where)
    head_dim = fields.integer("head_dim", 256, high=4096)
    rope_dim = int(head_dim * rope_fields.number("partial_rotary_factor", 0.25))
    if rope_dim < 2 or rope_dim % 2 or rope_dim > head_dim:
        raise ConfigError(
            f"{where}: partial_rotary_factor rotates {rope_dim} of {head_dim} dimensions; an even part is needed."
        )
    spec = ModelSpec(
        model_type=model_type.removesuffix("_text"),
        hidden=fields.integer("hidden_size", high=1 << 20),
        vocab=fields.integer("vocab_size", high=1 << 24),
        layer_types=_layer_types(fields, layers),
        eps=fields.number("rms_norm_eps", 1e-6),
        heads=fields.integer("num_attention_heads", high=4096),
        kv_heads=fields.integer("num_key_value_heads", high=4096),
        head_dim=head_dim,
        rope_dim=rope_dim,
        rope_theta=rope_fields.number("rope_theta", ROPE_THETA),
        key_heads=fields.integer("linear_num_key_heads", high=4096),
        value_heads=fields.integer("linear_num_value_heads", high=4096),
        key_dim=fields.integer("linear_key_head_dim", high=4096),
        value_dim=fields.integer("linear_value_head_dim", high=4096),
        conv=fields.integer("linear_conv_kernel_dim", 4, high=64),
        experts=fields.integer("num_experts", high=4096) if moe else 0,
        top_k=fields.integer("num_experts_per_tok", high=4096) if moe else 0,
        inter=fields.integer("moe_intermediate_size" if moe else "intermediate_size", high=1 << 20),
        shared_inter=fields.integer("shared_expert_intermediate_size", high=1 << 20) if moe else 0,
        tied=fields.flag("tie_word_embeddings"),
        max_context=fields.integer("max_position_embeddings", MAX_CONTEXT),
        mtp_layers=fields.integer("mtp_num_hidden_layers", 0, low=0, high=1),
    )
    if spec.heads % spec.kv_heads or spec.value_heads % spec.key_heads:
        raise ConfigError(
            f"{where}: {spec.heads} query heads over {spec.kv_heads} key heads and {spec.value_heads} GDN value heads "
            f"over {spec.key_heads} key heads must divide evenly."
        )
    if spec.top_k > spec.experts:
        raise ConfigError(f"{where}: num_experts_per_tok {spec.top_k} exceeds num_experts {spec.experts}.")
    return spec
