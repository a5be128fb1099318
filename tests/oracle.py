"""transformers as the independent model: tiny random checkpoints, and its weights replaced by a store's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_ttd.kernels import part_views
from mlx_ttd.observe import Trace
from mlx_ttd.spec import FULL
from mlx_ttd.store import Store, read_tensor

# The asymmetries of the published models: twice the value heads, grouped queries, a quarter of the head rotated.
SHAPE = {
    "vocab_size": 384,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "max_position_embeddings": 8192,
}
MOE = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}

NAMES = {
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
    "gdn.conv": "linear_attn.conv1d.weight",
    "gdn.a_log": "linear_attn.A_log",
    "gdn.dt_bias": "linear_attn.dt_bias",
    "gdn.norm": "linear_attn.norm.weight",
    "gdn.out": "linear_attn.out_proj.weight",
    "input_norm": "input_layernorm.weight",
    "post_norm": "post_attention_layernorm.weight",
    "moe.router": "mlp.gate.weight",
    "moe.gate_up": "mlp.experts.gate_up_proj",
    "moe.down": "mlp.experts.down_proj",
    "shared.gate": "mlp.shared_expert.gate_proj.weight",
    "shared.up": "mlp.shared_expert.up_proj.weight",
    "shared.down": "mlp.shared_expert.down_proj.weight",
    "shared.scale": "mlp.shared_expert_gate.weight",
    "mlp.gate": "mlp.gate_proj.weight",
    "mlp.up": "mlp.up_proj.weight",
    "mlp.down": "mlp.down_proj.weight",
}


def random_model(moe: bool = True, tied: bool = False, seed: int = 0, **changes: Any) -> Any:
    """A transformers model in fp32 whose norms, gates and biases are away from their initial values."""
    import torch
    import transformers

    torch.manual_seed(seed)
    kind = "Qwen3_5Moe" if moe else "Qwen3_5"
    shape = {**SHAPE, **(MOE if moe else {"intermediate_size": 192}), "tie_word_embeddings": tied, **changes}
    config = getattr(transformers, f"{kind}TextConfig")(**shape)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "dt_bias" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif "A_log" in name:
                parameter.copy_(torch.log(torch.rand_like(parameter) * 8 + 0.5))
            else:
                parameter.copy_(torch.randn_like(parameter) * (0.5 if "mlp.gate.weight" in name else 0.08))
    return model


def save(model: Any, path: Path, fused: bool = True, dtype: Any = None) -> Path:
    """Write a checkpoint as transformers does, experts fused or one by one."""
    import torch

    model = model.to(dtype) if dtype is not None else model
    model.save_pretrained(path, save_original_format=not fused)
    model.to(torch.float32)
    return path


def _dense(store: Store, name: str, where: dict[str, Any]) -> np.ndarray:
    q = store.quantisation(name)
    array = read_tensor(where[name])
    if q is not None:
        parts = [read_tensor(where[name + part]) for part in (".scales", ".biases") if name + part in where]
        array = mx.dequantize(array, *(_f32(p) for p in parts), group_size=q.group, bits=q.bits, mode=q.mode)
    return np.array(array.astype(mx.float32))


def _f32(array: mx.array) -> mx.array:
    return array if array.dtype == mx.uint8 else array.astype(mx.float32)


def _experts(store: Store, layer: int) -> tuple[np.ndarray, np.ndarray]:
    path, start, experts = store.expert_file(layer)
    layout = store.layouts[layer]
    assert layout is not None
    raw = np.fromfile(path, np.uint8, experts * layout.stride, offset=start).reshape(experts, layout.stride)
    matrices = []
    for matrix in (layout.gate_up, layout.down):
        codes, *scales = part_views(mx.array(raw), matrix)
        scales = [_f32(s) for s in scales if s is not None]
        dense = mx.dequantize(codes, *scales, group_size=matrix.group, bits=matrix.bits, mode=matrix.mode)
        matrices.append(np.array(dense.astype(mx.float32)))
    return matrices[0], matrices[1]


def store_weights(store: Store) -> dict[str, np.ndarray]:
    """Every weight of a store as transformers names it, dequantised to f32."""
    spec, found = store.spec, {}
    where = {**store.resident, **store.embedding}
    plus_one = store.norms == "1+w"
    for i, kind in enumerate(spec.layer_types):
        for role, name in NAMES.items():
            key, full = f"layers.{i}.{role}", f"model.layers.{i}.{name}"
            if role in ("moe.gate_up", "moe.down"):
                continue
            if key in where:
                found[full] = _dense(store, key, where)
                if role.endswith("norm") and role != "gdn.norm" and plus_one:
                    found[full] -= 1
                if role == "gdn.conv":
                    found[full] = found[full][:, None, :]
        if spec.is_moe:
            found[f"model.layers.{i}.{NAMES['moe.gate_up']}"], found[f"model.layers.{i}.{NAMES['moe.down']}"] = (
                _experts(store, i)
            )
        assert (f"model.layers.{i}.self_attn.q_proj.weight" in found) == (kind == FULL)
    found["model.norm.weight"] = _dense(store, "norm", where) - plus_one
    found["model.embed_tokens.weight"] = _dense(store, "embedding", where)
    found["lm_head.weight"] = found["model.embed_tokens.weight"] if spec.tied else _dense(store, "head", where)
    return found


def with_weights(model: Any, weights: dict[str, np.ndarray]) -> Any:
    """`model` with the given weights; every one of its own must be among them."""
    import torch

    missing, extra = model.load_state_dict({k: torch.from_numpy(v.copy()) for k, v in weights.items()}, strict=False)
    assert (missing, extra) == ([], [])
    return model


def oracle_logits(model: Any, tokens: list[int]) -> np.ndarray:
    """f32 logits [T, vocab] of one pass over `tokens`."""
    import torch

    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float().numpy()


def model_of(store: Store) -> Any:
    """transformers' fp32 model of a store, with the store's weights."""
    import transformers

    text = {**store.config, **store.config.get("text_config", {})}
    text = {k: v for k, v in text.items() if k not in ("text_config", "model_type", "architectures")}
    kind = "Qwen3_5Moe" if store.spec.is_moe else "Qwen3_5"
    config = getattr(transformers, f"{kind}TextConfig")(**text)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()
    return with_weights(model, store_weights(store))


def greedy(model: Any, tokens: list[int], count: int) -> list[int]:
    """`count` tokens that follow, each the most probable."""
    import torch

    with torch.no_grad():
        out = model.generate(
            torch.tensor([tokens]), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    return out[0, len(tokens) :].tolist()


def trace(model: Any, store: Store, tokens: list[int]) -> Trace:
    """What transformers makes of `tokens`, in the format of `mlx_ttd.trace`."""
    import torch

    rows: dict[str, np.ndarray] = {}

    def keep(name: str, pick: Any = lambda output: output):
        def hook(module: Any, inputs: Any, output: Any) -> None:
            rows[name] = pick(output).detach().float().reshape(len(tokens), -1).numpy()

        return hook

    def keep_router(layer: int):
        def hook(module: Any, inputs: Any, output: Any) -> None:
            _, weights, ids = output
            order = ids.argsort(dim=-1)
            rows[f"{layer}.router.ids"] = ids.gather(-1, order).to(torch.int32).numpy()
            rows[f"{layer}.router.weights"] = weights.gather(-1, order).float().numpy()

        return hook

    first = lambda output: output[0] if isinstance(output, tuple) else output  # noqa: E731
    model.model.embed_tokens.register_forward_hook(keep("embedding"))
    for i, layer in enumerate(model.model.layers):
        kind = "attention" if hasattr(layer, "self_attn") else "gdn"
        mixer = layer.self_attn if kind == "attention" else layer.linear_attn
        mixer.register_forward_hook(keep(f"{i}.{kind}", first))
        layer.register_forward_hook(keep(f"{i}.hidden", first))
        if store.spec.is_moe:
            layer.mlp.register_forward_hook(keep(f"{i}.experts", first))
            layer.mlp.gate.register_forward_hook(keep_router(i))
    model.lm_head.register_forward_hook(keep("logits"))
    oracle_logits(model, tokens)
    return Trace("transformers", store.digest, tuple(tokens), len(store.spec.layer_types), rows)
