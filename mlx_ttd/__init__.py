"""Mixture-of-experts language models larger than memory, on MLX."""

from ._version import __version__
from .api import LLM, Stats, convert, demo_path, info, load, trace, verify
from .compare import compare
from .errors import TTDError
from .generation import Chunk, Response
from .plan import plan

__all__ = [
    "LLM",
    "Chunk",
    "Response",
    "Stats",
    "TTDError",
    "__version__",
    "compare",
    "convert",
    "demo_path",
    "info",
    "load",
    "plan",
    "trace",
    "verify",
]
