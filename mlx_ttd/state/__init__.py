"""The state of a sequence: step, snapshot, restore."""

from .keys_values import NOWHERE, KVState
from .one_sequence import BATCHES, OneSequence
from .sequence import LayerState, RecurrentState, new_state, state_bytes
from .snapshot import Snapshot, load, put_back, save, take

__all__ = [
    "BATCHES",
    "NOWHERE",
    "KVState",
    "LayerState",
    "OneSequence",
    "RecurrentState",
    "Snapshot",
    "load",
    "new_state",
    "put_back",
    "save",
    "state_bytes",
    "take",
]
