"""Checkpoints in forms that are not read, recognised by the marks of their makers and refused by name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

from ..errors import CheckpointError
from ..spec import Format
from .safetensors_file import TensorInfo

METHODS = {
    "awq": "AWQ",
    "gptq": "GPTQ",
    "auto-round": "AutoRound",
    "compressed-tensors": "compressed-tensors",
    "modelopt": "ModelOpt",
    "bitsandbytes": "bitsandbytes",
    "fbgemm_fp8": "FP8 by rows",
    "mxfp4": "MXFP4 blocks",
}
# What a quantiser leaves beside a weight; the first that fits names the form.
MARKS = (
    (re.compile(r"\.weight_packed$"), "compressed-tensors"),
    (re.compile(r"\.weight_scale_2$"), "NVFP4"),
    (re.compile(r"\.qweight$"), "GPTQ or AWQ"),
    (re.compile(r"\.weight\.(absmax|quant_map|quant_state\..*)$|\.SCB$"), "bitsandbytes"),
    (re.compile(r"_blocks$"), "MXFP4 blocks"),
    (re.compile(r"\.weight_scale$"), "FP8 by tensors or rows"),
)
OTHER_FILES = ((".gguf", "GGUF"), (".bin", "pickled"), (".pt", "pickled"), (".pth", "pickled"))
INSTEAD = "take the bf16 checkpoint of this model, one in FP8 of 128 x 128 blocks, or one that mlx-lm quantised"


def refuse_file(path: Path) -> None:
    """CheckpointError where `path` is, or holds nothing but, files of another kind than safetensors."""
    try:
        held = sorted(path.iterdir()) if path.is_dir() else [path] if path.is_file() else []
    except OSError:
        return
    if not any(file.suffix == ".safetensors" or file.name.endswith(".safetensors.index.json") for file in held):
        refuse_names(str(path), (file.name for file in held))


def refuse_names(where: str, names: Iterable[str]) -> None:
    """CheckpointError where one of these files, among which is no safetensors, is known to be of another kind."""
    listed = list(names)
    for ending, kind in OTHER_FILES:
        if any(name.endswith(ending) for name in listed):
            raise CheckpointError(f"{where} is a {kind} checkpoint, which is not read; {INSTEAD}.")


def _declared(config: Mapping[str, Any]) -> str | None:
    mode = own.get("mode") if isinstance(own := config.get("quantization"), dict) else None
    if isinstance(mode, str) and mode not in get_args(Format):
        return f"{mode.upper()[:100]} by MLX"
    text = config.get("text_config")
    fields = config.get("quantization_config") or (isinstance(text, dict) and text.get("quantization_config"))
    if not isinstance(fields, dict) or not isinstance(method := fields.get("quant_method"), str):
        return None
    if method == "fp8":
        return None if fields.get("weight_block_size", [128, 128]) == [128, 128] else "FP8 in other blocks or none"
    if "nvfp4" in str([fields.get(key) for key in ("quant_algo", "format", "config_groups")]).lower():
        return "NVFP4"
    return METHODS.get(method.replace("_", "-"), METHODS.get(method, method[:100]))


def refuse_foreign(where: str, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> None:
    """CheckpointError where the config declares, or the tensors' names show, a quantisation that is not read."""
    found = _declared(config)
    if found is None and any(n.endswith("_scale_inv") and info.shape in ((), (1,)) for n, info in tensors.items()):
        found = "FP8 by tensors"
    if found is None:
        found = next((form for mark, form in MARKS if any(map(mark.search, tensors))), None)
    if found is not None:
        raise CheckpointError(f"{where} is quantised as {found}, which is not read; {INSTEAD}.")
