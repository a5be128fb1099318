"""Runs Metal kernels on a CPU, from the very text that MLX would hand to Apple's compiler.

k = metal_sim.metal_kernel(...)            # or monkeypatch.setattr(mx.fast, "metal_kernel", metal_sim.metal_kernel)
out = k(inputs=..., ..., diag=True)        # outputs, and .reports
with metal_sim.options(order="shuffle", seed=1) as runs: ...
"""

from .compile import why_not
from .errors import CompileError, LaunchError, SimError, SourceError
from .kernel import Options, Outputs, Run, SimKernel, complaints, metal_kernel, options

__all__ = [
    "CompileError",
    "LaunchError",
    "Options",
    "Outputs",
    "Run",
    "SimError",
    "SimKernel",
    "SourceError",
    "complaints",
    "metal_kernel",
    "options",
    "why_not",
]
