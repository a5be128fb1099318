"""The demo model's checkpoint: its geometry, and the files that a published Qwen3.5-MoE consists of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from demo_corpus import CONTROL_TOKENS, END_OF_TEXT, END_OF_TURN, VOCABULARY
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn
from transformers import PreTrainedModel

ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [3, 3, 2]}
GEOMETRY: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 256, "num_hidden_layers": 4, "max_position_embeddings": 32768,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    "num_experts": 24, "num_experts_per_tok": 4, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_parameters": {**ROPE, "mrope_interleaved": True},
}  # fmt: skip


def save(out: Path, trunk: PreTrainedModel, mtp: nn.Module, tokenizer: Tokenizer, template: str) -> None:
    """Write the checkpoint under the names of the published, multimodal wrapper; experts fused."""
    weights = {name.replace("model.", "model.language_model.", 1): value for name, value in trunk.state_dict().items()}
    shards = {
        "model-00001-of-00002.safetensors": weights,
        "model-00002-of-00002.safetensors": {f"mtp.{name}": value for name, value in mtp.state_dict().items()},
    }
    for name, tensors in shards.items():
        tensors = {key: value.to("cpu", torch.bfloat16).contiguous() for key, value in tensors.items()}
        save_file(tensors, out / name, metadata={"format": "pt"})
    size = 2 * sum(value.numel() for tensors in shards.values() for value in tensors.values())
    where = {key: name for name, tensors in shards.items() for key in sorted(tensors)}
    stop, end = tokenizer.token_to_id(END_OF_TURN), tokenizer.token_to_id(END_OF_TEXT)
    text = {
        "model_type": "qwen3_5_moe_text", "dtype": "bfloat16", **GEOMETRY, "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4, "hidden_act": "silu", "attn_output_gate": True, "attention_bias": False,
        "router_aux_loss_coef": trunk.router_aux_loss_coef, "mamba_ssm_dtype": "float32", "eos_token_id": end,
        "mtp_num_hidden_layers": 1, "num_mtp_layers": 1, "mtp_layer_types": ["full_attention"],
        "mtp_use_dedicated_embeddings": False,
    }  # fmt: skip
    documents = {
        "model.safetensors.index.json": {"metadata": {"total_size": size}, "weight_map": where},
        "config.json": {
            "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
            "tie_word_embeddings": False, "text_config": text,
        },
        "generation_config.json": {
            "do_sample": True, "temperature": 1.0, "top_k": 20, "top_p": 0.95,
            "eos_token_id": [stop, end], "pad_token_id": end,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "Qwen3_5Tokenizer", "add_prefix_space": False, "clean_up_tokenization_spaces": False,
            "bos_token": None, "eos_token": END_OF_TURN, "pad_token": END_OF_TEXT, "unk_token": None,
            "additional_special_tokens": list(CONTROL_TOKENS[1:]), "model_max_length": 32768,
        },
    }  # fmt: skip
    for name, document in documents.items():
        (out / name).write_text(json.dumps(document, indent=2) + "\n")
    (out / "chat_template.jinja").write_text(template)
    tokenizer.save(str(out / "tokenizer.json"))
