"""Which expert leaves a full layer."""

from . import fifo, lfu, lru
from .base import Policy, make_policy, policy_names

__all__ = ["Policy", "fifo", "lfu", "lru", "make_policy", "policy_names"]
