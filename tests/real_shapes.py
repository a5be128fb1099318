"""A bf16 checkpoint of the real 35B shapes with few layers, its values repeated from one random block."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from checkpoints import bf16, source_name

from mlx_ttd.spec import model_spec, trunk_tensors

TEXT_35B = {
    "model_type": "qwen3_5_moe_text",
    "vocab_size": 248_320,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
}
BLOCK_BYTES = 32 << 20


def write_real_shapes(path: Path, layers: int = 4) -> Path:
    """The checkpoint directory: (1.7 GB a layer) + 2 GB of embedding and head."""
    text = TEXT_35B | {"num_hidden_layers": layers}
    config = {"model_type": "qwen3_5_moe", "text_config": text}
    block = bf16(np.random.default_rng(0).standard_normal(BLOCK_BYTES // 2, np.float32) * np.float32(0.02)).tobytes()
    header, offset = {}, 0
    for tensor in trunk_tensors(model_spec(config)):
        shape = [tensor.shape[0], 1, tensor.shape[1]] if tensor.kind == "conv" else list(tensor.shape)
        end = offset + 2 * int(np.prod(shape))
        header[source_name(tensor, "model.language_model.")] = {
            "dtype": "BF16",
            "shape": shape,
            "data_offsets": [offset, end],
        }
        offset = end
    encoded = json.dumps(header).encode()
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    with open(path / "model.safetensors", "wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for start in range(0, offset, BLOCK_BYTES):
            file.write(block[: min(BLOCK_BYTES, offset - start)])
    return path
