"""The state of a sequence: step, snapshot, restore."""

from .sequence import NOWHERE, KVState, LayerState, RecurrentState, new_state, state_bytes
from .snapshot import Snapshot, load, put_back, save, take

__all__ = [
    "NOWHERE",
    "KVState",
    "LayerState",
    "RecurrentState",
    "Snapshot",
    "load",
    "new_state",
    "put_back",
    "save",
    "state_bytes",
    "take",
]
