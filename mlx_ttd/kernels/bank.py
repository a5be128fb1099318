"""Writing records into a slot bank where the host cannot write the bank's memory itself (CUDA)."""

from __future__ import annotations

import mlx.core as mx


def bank_write(bank: mx.array, staging: mx.array, slots: list[int]) -> mx.array:
    """The bank uint8 [slots, stride] with staging uint8 [n, stride] written to `slots` [n].

    MLX reuses the bank's buffer when the caller holds the only reference, so pass it on and keep the result.
    """
    bank[mx.array(slots)] = staging
    return bank
