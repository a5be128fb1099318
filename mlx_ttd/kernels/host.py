"""Small arrays between the host and MLX, which a streamed step cannot do without."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ..errors import KernelError


def to_host(array: mx.array, meanwhile: Sequence[mx.array] = ()) -> np.ndarray:
    """`array` as numpy, waited for; `meanwhile` are started behind it. KernelError inside a graph transformation."""
    try:
        mx.async_eval(array, *meanwhile)
        return np.array(array)
    except ValueError:
        raise KernelError(
            "a streamed model reads its router's choice back in every step, so it cannot run inside mx.compile, "
            "mx.grad or mx.vmap; call it outside of them."
        ) from None


def to_device(array: np.ndarray) -> mx.array:
    """`array` as MLX's, same dtype and shape."""
    # Given a numpy array, MLX 0.32 first asks what kind it is, and takes a KeyboardInterrupt in that for a no.
    return mx.array(array.data)  # type: ignore[arg-type]
