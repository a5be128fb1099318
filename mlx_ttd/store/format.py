"""The store's files: their names, what lies in each, and the forms a tensor may have."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

from ..spec import STRIDE_UNIT, ModelSpec, Quantisation, Tensor, mtp_tensors, trunk_tensors

FORMAT, VERSION = "mlx_ttd store", 1
MANIFEST, CONFIG = "manifest.json", "config.json"
# A store of 397 billion parameters has 31 thousand digests, 2.5 MB.
MANIFEST_BYTES = 32 << 20
RESIDENT, EMBEDDING, MTP, MTP_EXPERTS = (
    "resident.safetensors",
    "embedding.safetensors",
    "mtp.safetensors",
    "experts/mtp-000.safetensors",
)
VERBATIM = (
    CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
NAMED_TEMPLATE = re.compile(r"additional_chat_templates/[^/\\.\x00-\x1f][^/\\\x00-\x1f]{0,99}\.jinja")
VERBATIM_LIMIT = 256 << 20
RECORDS, RECORDS_START = "records", STRIDE_UNIT
PLAIN_DTYPES = ("F32", "BF16", "F16")
SCALE_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "uint8": "U8"}
BITS, GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)

Norms = Literal["w", "1+w"]


def expert_file(layer: int) -> str:
    """The file that holds the expert records of a trunk layer."""
    return f"experts/layer-{layer:03d}.safetensors"


def verbatim(names: Iterable[str]) -> list[str]:
    """Those of a checkpoint's files, relative to its root, that a store has as they are."""
    held = set(names)
    return [name for name in VERBATIM if name in held] + sorted(filter(NAMED_TEMPLATE.fullmatch, held))


def check_quantisation(q: Quantisation, cols: int) -> str | None:
    """Why `q` cannot pack rows of `cols` values, or None when it can."""
    if q.mode == "mxfp4":
        if (q.bits, q.group, q.scale_dtype) != (4, 32, "uint8"):
            return "mxfp4 has 4 bits, groups of 32 and uint8 scales"
    elif (
        q.mode != "affine"
        or q.bits not in BITS
        or q.group not in GROUPS
        or q.scale_dtype not in tuple(SCALE_DTYPES)[:3]
    ):
        return f"affine codes have {BITS} bits, groups of {GROUPS} and floating scales"
    return f"rows of {cols} values do not divide into groups of {q.group}" if cols % q.group else None


def parts(
    name: str, shape: tuple[int, ...], q: Quantisation | None, dtype: str
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The safetensors entries (dtype, shape) of one tensor: itself, or codes with '.scales' and '.biases'."""
    if q is None:
        return {name: (dtype, shape)}
    *lead, cols = shape
    scales = (SCALE_DTYPES[q.scale_dtype], (*lead, cols // q.group))
    entries = {name: ("U32", (*lead, cols * q.bits // 32)), name + ".scales": scales}
    return entries if q.mode == "mxfp4" else {**entries, name + ".biases": scales}


def tensors_of(spec: ModelSpec, file: str) -> list[Tensor]:
    """The model tensors that lie, plain or packed row by row, in one of the three dense files."""
    if file == EMBEDDING:
        return [] if spec.tied else [t for t in trunk_tensors(spec) if t.name == "embedding"]
    if file == MTP:
        return [t for t in mtp_tensors(spec) if t.kind != "experts"]
    return [t for t in trunk_tensors(spec) if t.kind != "experts" and (spec.tied or t.name != "embedding")]


def store_files(spec: ModelSpec, mtp: bool) -> dict[str, int | None]:
    """Every tensor file of a store in the order of writing; expert files map to their layer (the MTP layer's to 0)."""
    files: dict[str, int | None] = {RESIDENT: None}
    if not spec.tied:
        files[EMBEDDING] = None
    if spec.is_moe:
        files |= {expert_file(i): i for i in range(len(spec.layer_types))}
    if mtp:
        files |= {MTP: None} | ({MTP_EXPERTS: 0} if spec.is_moe else {})
    return files
