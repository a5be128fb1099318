"""MLX modules that models are made of. They take rows [T, H] and a mode (decode, verify, prefill)."""

from .attention import GatedAttention
from .gated_delta_net import GatedDeltaNet
from .mlp import SwiGLU
from .moe import MoE, StreamedExperts
from .weights import Linear, ResidentWeights

__all__ = ["GatedAttention", "GatedDeltaNet", "Linear", "MoE", "ResidentWeights", "StreamedExperts", "SwiGLU"]
