"""Checkpoints of other quantisers are called by their names, before a byte of their weights is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import FP8, MOE, Tensors, fp8_tensors, hf_tensors, tiny, values, write

import mlx_ttd
from mlx_ttd.errors import CheckpointError
from mlx_ttd.spec import model_spec
from mlx_ttd.store import convert

INSTEAD = "take the bf16 checkpoint of this model"
DECLARED = [
    ({"quant_method": "awq", "bits": 4, "group_size": 128}, "AWQ"),
    ({"quant_method": "gptq", "bits": 4}, "GPTQ"),
    ({"quant_method": "auto-round"}, "AutoRound"),
    ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "compressed-tensors"),
    ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "NVFP4"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4"),
    ({"quant_method": "modelopt", "quant_algo": "FP8"}, "ModelOpt"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
    ({"quant_method": "fp8", "weight_block_size": None}, "FP8 in other blocks or none"),
    ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "FP8 in other blocks or none"),
    ({"quant_method": "hqq"}, "hqq"),
]
NAMES = [
    ("qweight", "GPTQ or AWQ"),
    ("weight_packed", "compressed-tensors"),
    ("weight_scale_2", "NVFP4"),
    ("weight.absmax", "bitsandbytes"),
    ("weight_scale", "FP8 by tensors or rows"),
]


def tensors() -> Tensors:
    spec = model_spec(MOE)
    return hf_tensors(spec, values(spec))


@pytest.mark.parametrize(("fields", "name"), DECLARED)
@pytest.mark.parametrize("place", ["outside", "in text_config"])
def test_what_a_config_declares(tmp_path: Path, fields: dict[str, Any], name: str, place: str) -> None:
    said = {"quantization_config": fields}
    config = MOE | said if place == "outside" else MOE | {"text_config": MOE["text_config"] | said}
    with pytest.raises(CheckpointError, match=f"is quantised as {name}, which is not read; {INSTEAD}"):
        convert(write(tmp_path / "src", config, tensors()), tmp_path / "dst")


@pytest.mark.parametrize("mode", ["nvfp4", "mxfp8"])
def test_what_mlx_declares(tmp_path: Path, mode: str) -> None:
    config = MOE | {"quantization": {"group_size": 16, "bits": 4, "mode": mode}}
    with pytest.raises(CheckpointError, match=f"is quantised as {mode.upper()} by MLX, which is not read; {INSTEAD}"):
        convert(write(tmp_path / "src", config, tensors()), tmp_path / "dst")


@pytest.mark.parametrize(("suffix", "name"), NAMES)
def test_what_the_names_of_tensors_show(tmp_path: Path, suffix: str, name: str) -> None:
    found = tensors() | {f"model.language_model.layers.3.self_attn.q_proj.{suffix}": ("U8", np.zeros(4, np.uint8))}
    with pytest.raises(CheckpointError, match=f"is quantised as {name}, which is not read; {INSTEAD}"):
        convert(write(tmp_path / "src", MOE, found), tmp_path / "dst")


def test_fp8_with_one_scale_a_tensor(tmp_path: Path) -> None:
    spec = model_spec(FP8)
    found = fp8_tensors(hf_tensors(spec, values(spec)), "F32").encoded
    found["model.language_model.layers.3.self_attn.q_proj.weight_scale_inv"] = "F32", np.ones((), np.float32)
    with pytest.raises(CheckpointError, match="is quantised as FP8 by tensors, which is not read"):
        convert(write(tmp_path / "src", FP8, found), tmp_path / "dst")


@pytest.mark.parametrize(("name", "kind"), [("model-Q4_K_M.gguf", "GGUF"), ("pytorch_model.bin", "pickled")])
def test_files_of_other_kinds(tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / name).write_bytes(b"GGUF")
    for source in (tmp_path / "src", tmp_path / "src" / name):
        with pytest.raises(CheckpointError, match=f"is a {kind} checkpoint, which is not read; {INSTEAD}"):
            convert(source, tmp_path / "dst")
        with pytest.raises(CheckpointError, match=f"is a {kind} checkpoint, which is not read; {INSTEAD}"):
            mlx_ttd.load(source)


def test_a_gguf_beside_safetensors_changes_nothing(tmp_path: Path) -> None:
    source = tiny(tmp_path / "src")
    (source / "model.gguf").write_bytes(b"GGUF")
    assert convert(source, tmp_path / "dst").is_dir()
