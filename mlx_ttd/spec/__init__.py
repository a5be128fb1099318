"""What a model is, as data: configuration, tensor roles and the layout of an expert record. No arrays."""

from .json_file import CONFIG_BYTES, json_object, parse_json, read_json
from .model_spec import FULL, LINEAR, ModelSpec, model_spec, text_config
from .numbers import plain_number
from .record_layout import (
    ALIGNMENT,
    SCALE_BYTES,
    STRIDE_UNIT,
    Format,
    Matrix,
    Quantisation,
    RecordLayout,
    align,
    record_layout,
)
from .regular_file import POINTER, open_regular, pointer_sentence, read_small, require_regular
from .roles import Tensor, layer_tensors, mtp_tensors, trunk_tensors
from .user_path import absolute_path, user_path

__all__ = [
    "ALIGNMENT",
    "CONFIG_BYTES",
    "FULL",
    "LINEAR",
    "POINTER",
    "SCALE_BYTES",
    "STRIDE_UNIT",
    "Format",
    "Matrix",
    "ModelSpec",
    "Quantisation",
    "RecordLayout",
    "Tensor",
    "absolute_path",
    "align",
    "json_object",
    "layer_tensors",
    "model_spec",
    "mtp_tensors",
    "open_regular",
    "parse_json",
    "plain_number",
    "pointer_sentence",
    "read_json",
    "read_small",
    "record_layout",
    "require_regular",
    "text_config",
    "trunk_tensors",
    "user_path",
]
