"""Tiny random checkpoints in every source layout, written with numpy alone from one set of values per seed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_ttd.spec import ModelSpec, Tensor, model_spec, mtp_tensors, trunk_tensors

# The asymmetries of the published models: twice the value heads, grouped queries, shared expert, untied head.
TEXT = {
    "model_type": "qwen3_5_moe_text",
    "vocab_size": 192,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "rope_type": "default"},
}
MOE = {"model_type": "qwen3_5_moe", "text_config": TEXT}
DENSE_TEXT = {k: v for k, v in TEXT.items() if "expert" not in k and "moe" not in k} | {
    "model_type": "qwen3_5_text",
    "intermediate_size": 192,
}
DENSE = {"model_type": "qwen3_5", "text_config": DENSE_TEXT}
TIED = {"model_type": "qwen3_5", "text_config": DENSE_TEXT | {"tie_word_embeddings": True}}
FP8 = {"model_type": "qwen3_5_moe", "text_config": TEXT | {"hidden_size": 256, "moe_intermediate_size": 128}}
NEXT = TEXT | {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]}

NAMES = {
    "embedding": "embed_tokens.weight",
    "norm": "norm.weight",
    "mtp.fc": "fc.weight",
    "mtp.norm_embedding": "pre_fc_norm_embedding.weight",
    "mtp.norm_hidden": "pre_fc_norm_hidden.weight",
    "mtp.norm": "norm.weight",
    "input_norm": "input_layernorm.weight",
    "post_norm": "post_attention_layernorm.weight",
    "gdn.conv": "linear_attn.conv1d.weight",
    "gdn.a_log": "linear_attn.A_log",
    "gdn.dt_bias": "linear_attn.dt_bias",
    "gdn.norm": "linear_attn.norm.weight",
    "gdn.out": "linear_attn.out_proj.weight",
    "attn.q_norm": "self_attn.q_norm.weight",
    "attn.k_norm": "self_attn.k_norm.weight",
    "moe.router": "mlp.gate.weight",
    "shared.scale": "mlp.shared_expert_gate.weight",
    "moe.gate_up": "mlp.experts.gate_up_proj",
    "moe.down": "mlp.experts.down_proj",
    **{f"attn.{x}": f"self_attn.{x}_proj.weight" for x in "qkvo"},
    **{f"gdn.in_{x}": f"linear_attn.in_proj_{x}.weight" for x in ("qkv", "z", "a", "b")},
    **{f"shared.{x}": f"mlp.shared_expert.{x}_proj.weight" for x in ("gate", "up", "down")},
    **{f"mlp.{x}": f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")},
}
DTYPES = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,
    "U32": np.uint32,
    "U8": np.uint8,
    "F8_E4M3": np.uint8,
}

Stored = tuple[str, np.ndarray]  # safetensors dtype, array of the numpy type in DTYPES
Tensors = dict[str, Stored]


def bf16(values: np.ndarray) -> np.ndarray:
    """f32 to the bits of bf16, nearest even."""
    return np.array(mx.array(values).astype(mx.bfloat16).view(mx.uint16))


def f32(stored: Stored) -> np.ndarray:
    """A plain stored tensor as f32."""
    dtype, array = stored
    return (array.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else array.astype(np.float32)


def plain(dtype: str, values: np.ndarray) -> Stored:
    return dtype, bf16(values) if dtype == "BF16" else values.astype(DTYPES[dtype])


def write_safetensors(path: Path, tensors: Tensors, made_by: str | None = None) -> None:
    """A safetensors file, written here so that the library's own writer is not tested by itself.

    made_by: the format in its metadata, 'pt' or 'mlx'.
    """
    header: dict[str, Any] = {} if made_by is None else {"__metadata__": {"format": made_by}}
    offset = 0
    for name, (dtype, array) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, array in tensors.values():
            file.write(np.ascontiguousarray(array).tobytes())


def values(spec: ModelSpec, seed: int = 0, mtp: bool = False, dtype: str = "BF16") -> dict[str, Stored]:
    """Random weights by the store's names; A_log and the gated norm are F32 as in published Qwen3.5."""
    rng = np.random.default_rng(seed)
    found = {}
    for t in trunk_tensors(spec) + (mtp_tensors(spec) if mtp else []):
        scale = 1 / math.sqrt(t.shape[-1]) if t.kind in ("matrix", "experts") else 0.3
        array = (rng.standard_normal(t.shape) * scale).astype(np.float32)
        found[t.name] = plain("F32" if t.role in ("gdn.a_log", "gdn.norm") else dtype, array)
    return found


def source_name(tensor: Tensor, prefix: str, head: str = "lm_head.weight", mtp: str = "mtp.") -> str:
    """The Hugging Face name of a tensor below `prefix` (of the trunk), `mtp` (of the MTP layer)."""
    if tensor.name == "head":
        return head
    base = mtp if tensor.name.startswith("mtp.") else prefix
    return base + (f"layers.{tensor.layer}." if tensor.layer is not None else "") + NAMES[tensor.role]


def hf_tensors(
    spec: ModelSpec, weights: dict[str, Stored], prefix: str = "model.language_model.", experts: str = "fused"
) -> Tensors:
    """The weights under Hugging Face names; `experts` is 'fused' or 'each'."""
    out: Tensors = {}
    for t in trunk_tensors(spec) + mtp_tensors(spec):
        if t.name not in weights:
            continue
        (dtype, array), name = weights[t.name], source_name(t, prefix)
        if t.kind == "conv":
            array = array[:, None, :]
        if t.kind != "experts" or experts == "fused":
            out[name] = dtype, array
            continue
        halves = (
            {"gate": array[:, : spec.inter], "up": array[:, spec.inter :]}
            if t.role == "moe.gate_up"
            else {"down": array}
        )
        for e in range(spec.experts):
            for part, half in halves.items():
                out[f"{name.rsplit('.', 1)[0]}.{e}.{part}_proj.weight"] = dtype, half[e]
    return out


def next_tensors(spec: ModelSpec, weights: dict[str, Stored]) -> Tensors:
    """The weights under qwen3_next names: qkv with z and b with a fused, their rows interleaved by key head."""
    out = hf_tensors(spec, weights, "model.", "each")
    heads, h = spec.key_heads, spec.hidden
    for layer, kind in enumerate(spec.layer_types):
        if kind != "linear_attention":
            continue
        base = f"model.layers.{layer}.linear_attn.in_proj_"
        (dtype, qkv), (_, z) = out.pop(base + "qkv.weight"), out.pop(base + "z.weight")
        (_, b), (_, a) = out.pop(base + "b.weight"), out.pop(base + "a.weight")
        q, k, v = np.split(qkv, [spec.key_width, 2 * spec.key_width])
        by_head = [[x.reshape(heads, -1, h) for x in group] for group in ((q, k, v, z), (b, a))]
        for name, group in zip(("qkvz", "ba"), by_head, strict=True):
            out[f"{base}{name}.weight"] = dtype, np.concatenate(group, axis=1).reshape(-1, h)
    return out


def packed(stored: Stored, bits: int, group: int, mode: str = "affine") -> tuple[Stored, ...]:
    """A matrix as mx.quantize packs it in its own dtype: codes, scales and, affine only, biases."""
    array = mx.array(f32(stored)).astype({"BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32}[stored[0]])
    codes, scales, *biases = mx.quantize(array, group, bits, mode=mode)

    def bits_of(x: mx.array) -> np.ndarray:
        return np.array(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x)

    scale_dtype = stored[0] if mode == "affine" else "U8"
    return (("U32", np.array(codes)), *((scale_dtype, bits_of(x)) for x in (scales, *biases)))


def mlx_tensors(
    spec: ModelSpec, weights: dict[str, Stored], quantise: Callable[[str], tuple[int, int, str] | None] | None = None
) -> Tensors:
    """The weights as mlx-lm stores them: stacked experts, conv [C, kernel, 1], norms 1 + w, matrices packed.

    `quantise` maps a module path to (bits, group, mode), or None for plain.
    """
    out: Tensors = {}

    def put(module: str, stored: Stored) -> None:
        choice = quantise(module) if quantise else None
        parts = (stored,) if choice is None else packed(stored, *choice)
        for suffix, part in zip((".weight", ".scales", ".biases"), parts, strict=False):
            out[module + suffix] = part

    for t in trunk_tensors(spec):
        dtype, array = weights[t.name]
        name = source_name(t, "language_model.model.", "language_model.lm_head.weight")
        if t.kind == "experts":
            base = name.rsplit(".", 2)[0] + ".switch_mlp."
            halves = (
                {"gate": array[:, : spec.inter], "up": array[:, spec.inter :]} if "gate" in name else {"down": array}
            )
            for part, half in halves.items():
                put(f"{base}{part}_proj", (dtype, half))
        elif t.kind == "matrix":
            put(name.removesuffix(".weight"), (dtype, array))
        elif t.kind == "norm":
            out[name] = plain(dtype, f32((dtype, array)) + 1)
        else:
            out[name] = dtype, array[..., None] if t.kind == "conv" else array
    return out


def write(
    path: Path, config: dict[str, Any], tensors: Tensors, shards: int = 1, extra: dict[str, str] | None = None
) -> Path:
    """A checkpoint directory: config, one file or several with an index, and `extra` text files."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    for name, text in (extra or {}).items():
        (path / name).write_text(text)
    if shards == 1:
        write_safetensors(path / "model.safetensors", tensors)
        return path
    names = list(tensors)
    files = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    for i, file in enumerate(files):
        write_safetensors(path / file, {n: tensors[n] for n in names[i::shards]})
    index = {"weight_map": {n: files[i % shards] for i, n in enumerate(names)}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def tiny(path: Path, config: dict[str, Any] = MOE, seed: int = 0, mtp: bool = False, dtype: str = "BF16") -> Path:
    """A published-style checkpoint (multimodal prefix, fused experts) of random weights."""
    spec = model_spec(config)
    return write(path, config, hf_tensors(spec, values(spec, seed, mtp, dtype)))


class FP8Tensors(NamedTuple):
    """A block-FP8 checkpoint, and what its encoded tensors stand for."""

    encoded: Tensors
    plain: Tensors

    def decoded(self, spec: ModelSpec) -> dict[str, Stored]:
        """The decoded weights (BF16) by the store's names, experts stacked."""
        found = {}
        for t in trunk_tensors(spec):
            name = source_name(t, "model.language_model.")
            if name in self.plain:
                found[t.name] = self.plain[name]
            elif t.kind == "experts":
                base = name.rsplit(".", 1)[0]
                halves = ("gate", "up") if t.role == "moe.gate_up" else ("down",)
                each = [[self.plain[f"{base}.{e}.{h}_proj.weight"][1] for h in halves] for e in range(spec.experts)]
                found[t.name] = "BF16", np.stack([np.concatenate(parts) for parts in each])
        return found


def fp8_tensors(tensors: Tensors, scale_dtype: str) -> FP8Tensors:
    """Every large matrix as e4m3 codes with one scale per 128 x 128 block; `scale_dtype` is F32, BF16 or F8_E8M0."""
    encoded, decoded = dict(tensors), {}
    for name in tensors:
        if "_proj" not in name or "in_proj_a" in name or "in_proj_b" in name:
            continue
        x = f32(tensors[name])
        *lead, rows, cols = x.shape
        blocks = (-(-rows // 128), -(-cols // 128))
        padded = np.zeros((*lead, blocks[0] * 128, blocks[1] * 128), np.float32)
        padded[..., :rows, :cols] = x
        scale = np.abs(padded.reshape(*lead, blocks[0], 128, blocks[1], 128)).max((-3, -1)) / 448
        if scale_dtype == "F8_E8M0":
            exponent = np.ceil(np.log2(scale)).astype(np.int32) + 127
            stored, scale = exponent.astype(np.uint8), np.exp2(exponent - 127).astype(np.float32)
        else:
            stored = plain(scale_dtype, scale)[1]
            scale = f32((scale_dtype, stored))
        full = np.repeat(np.repeat(scale, 128, -2), 128, -1)[..., :rows, :cols]
        codes = mx.to_fp8(mx.array(x / full))
        encoded[name] = "F8_E4M3", np.array(codes)
        encoded[name + "_scale_inv"] = scale_dtype, stored
        decoded[name] = "BF16", bf16(np.array(mx.from_fp8(codes, mx.float32)) * full)
    return FP8Tensors(encoded, decoded)
