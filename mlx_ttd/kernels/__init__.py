"""The operations that are worth own kernels: a plain MLX reference each, and the choice of Metal, CUDA or native."""

# Each of these registers its variants.
from . import (
    gpu_attention,
    gpu_expert_tiles,
    gpu_experts,
    gpu_gated_delta,
    gpu_linear,
    gpu_linear_pair,
    gpu_moe,
    gpu_norms,
    gpu_router,
    native_attention,
    native_delta_mixer,
    native_experts,
    native_gated_delta,
    native_linear,
    native_moe,
    native_norms,
    native_quantize,
    native_router,
    native_top,
)
from .attention import ATTENTION_BLOCK, attention, attention_inputs
from .backend import Mode, chosen, device_kind, forced, forced_kind, set_backend, used
from .bank import bank_write
from .bf16_products import bf16_products, has_bf16_products
from .delta_mixer import DeltaMixer, delta_inputs, delta_mixer
from .expert_ffn import Records, combine, expert_contributions, expert_ffn, expert_ffn_accumulate, part_views
from .first_use import announcing, compile_seconds, working_clock
from .fork import require_unforked
from .gated_delta import GatedDelta, gated_delta
from .gates import sigmoid_scaled, swiglu, swiglu_linear
from .gpu import require_simd_width
from .gpu_attention import WIDTHS as ATTENTION_WIDTHS
from .gpu_attention import position
from .host import to_device, to_host
from .huge_pages import in_huge_pages
from .kept_rows import KeptRows, quantise_rows, rows_parts
from .linear import BLOCK, head, linear, linear_pair
from .moe import SharedExpert, moe, shared_expert
from .native import extension as native_extension
from .native import native_status
from .norms import add_rms_norm, gated_rms_norm, norm_rope, rms_norm
from .quantize import quantize
from .router import Routed, route, router
from .top import top
from .weight import Weight
from .work import compiled, counting

__all__ = [
    "ATTENTION_BLOCK",
    "ATTENTION_WIDTHS",
    "BLOCK",
    "DeltaMixer",
    "GatedDelta",
    "KeptRows",
    "Mode",
    "Records",
    "Routed",
    "SharedExpert",
    "Weight",
    "add_rms_norm",
    "announcing",
    "attention",
    "attention_inputs",
    "bank_write",
    "bf16_products",
    "chosen",
    "combine",
    "compile_seconds",
    "compiled",
    "counting",
    "delta_inputs",
    "delta_mixer",
    "device_kind",
    "expert_contributions",
    "expert_ffn",
    "expert_ffn_accumulate",
    "forced",
    "forced_kind",
    "gated_delta",
    "gated_rms_norm",
    "has_bf16_products",
    "head",
    "in_huge_pages",
    "linear",
    "linear_pair",
    "moe",
    "native_extension",
    "native_status",
    "norm_rope",
    "part_views",
    "position",
    "quantise_rows",
    "quantize",
    "require_simd_width",
    "require_unforked",
    "rms_norm",
    "route",
    "router",
    "rows_parts",
    "set_backend",
    "shared_expert",
    "sigmoid_scaled",
    "swiglu",
    "swiglu_linear",
    "to_device",
    "to_host",
    "top",
    "used",
    "working_clock",
]
