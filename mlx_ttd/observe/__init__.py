"""Seeing inside a run: counters, phases, traces."""

from .counters import Counters

__all__ = ["Counters"]
