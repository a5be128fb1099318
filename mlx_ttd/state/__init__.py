"""The state of a sequence: step, save, restore."""

from .keys_values import NOWHERE, KVState
from .one_sequence import BATCHES, OneSequence
from .restoring import SavedState, saved_state
from .saving import save
from .sequence import LayerState, RecurrentState, new_state, state_bytes

__all__ = [
    "BATCHES",
    "NOWHERE",
    "KVState",
    "LayerState",
    "OneSequence",
    "RecurrentState",
    "SavedState",
    "new_state",
    "save",
    "saved_state",
    "state_bytes",
]
