"""Writing records into a slot bank where the host cannot write the bank's memory itself (CUDA)."""

from __future__ import annotations

import mlx.core as mx

from .work import sent


def bank_write(bank: mx.array, slot: int, record: mx.array) -> mx.array:
    """The bank uint8 [slots, stride] with record uint8 [stride] written to one of its slots.

    MLX reuses the bank's buffer when the caller holds the only reference, so pass it on and keep the result.
    """
    sent(record)
    bank[slot] = record
    return bank
