"""Seeing inside a run: counters, phases, traces and their differences."""

from .cancellation import Cancelled, cancel_point, check_at_cancel_points
from .counters import Counters
from .diff import Difference, first_difference, incomparable
from .machine import MachineState, machine_state, swap_and_page_outs
from .probe import MODEL, note, probing, watched
from .profile import Profile
from .trace import Recorder, Trace, load_trace, make_trace_folder

__all__ = [
    "MODEL",
    "Cancelled",
    "Counters",
    "Difference",
    "MachineState",
    "Profile",
    "Recorder",
    "Trace",
    "cancel_point",
    "check_at_cancel_points",
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
