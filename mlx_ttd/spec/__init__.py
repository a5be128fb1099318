"""What a model is, as data: configuration, tensor roles and the layout of an expert record. No arrays."""

from .model_spec import FULL, LINEAR, ModelSpec, model_spec, read_json, text_config
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
from .roles import Tensor, layer_tensors, mtp_tensors, trunk_tensors

__all__ = [
    "ALIGNMENT",
    "FULL",
    "LINEAR",
    "SCALE_BYTES",
    "STRIDE_UNIT",
    "Format",
    "Matrix",
    "ModelSpec",
    "Quantisation",
    "RecordLayout",
    "Tensor",
    "align",
    "layer_tensors",
    "model_spec",
    "mtp_tensors",
    "plain_number",
    "read_json",
    "record_layout",
    "text_config",
    "trunk_tensors",
]
