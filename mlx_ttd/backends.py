"""The options `backend` and `matmul`: how kernels run, or why they cannot run so."""

from __future__ import annotations

from . import kernels
from .errors import KernelError


def force_backend(name: str) -> None:
    """Let every kernel run as `name` says, "auto" as this machine prefers. KernelError where that cannot be had.

    The choice is the process's, so the model that was loaded last has it. A plain operation that has one
    implementation alone runs in that one.
    """
    if name == "native" and kernels.native_status().startswith("none"):
        reason = kernels.native_status().partition(": ")[2]
        raise KernelError(f"backend='native' cannot be had: {reason}; reinstall mlx_ttd, or take backend='auto'.")
    if name == "gpu" and kernels.device_kind() == "cpu":
        raise KernelError("backend='gpu' cannot be had: MLX's default device is the CPU; take backend='auto'.")
    if name == "native" and kernels.device_kind() != "cpu":
        raise KernelError("backend='native' cannot be had on a GPU; make the CPU MLX's default device, or take 'auto'.")
    kernels.set_backend(None if name == "auto" else name)  # type: ignore[arg-type]


def require_matmul(name: str) -> None:
    """KernelError where the products that the option `matmul` names cannot be made here."""
    if name == "bf16" and not kernels.has_bf16_products():
        raise KernelError(
            "matmul='bf16' cannot be had: it needs the native part and a CPU with AMX-BF16; take matmul='exact'."
        )
