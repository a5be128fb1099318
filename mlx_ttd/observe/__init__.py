"""Seeing inside a run: counters, phases, traces and their differences."""

from .counters import Counters
from .diff import Difference, first_difference, incomparable
from .machine import MachineState, machine_state, swap_and_page_outs
from .probe import MODEL, note, probing, watched
from .profile import Profile
from .trace import Recorder, Trace, load_trace, make_trace_folder

__all__ = [
    "MODEL",
    "Counters",
    "Difference",
    "MachineState",
    "Profile",
    "Recorder",
    "Trace",
    "first_difference",
    "incomparable",
    "load_trace",
    "machine_state",
    "make_trace_folder",
    "note",
    "probing",
    "swap_and_page_outs",
    "watched",
]
