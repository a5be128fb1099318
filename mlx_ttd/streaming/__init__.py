"""Which experts are in memory: provider, leases, slots, policies, reads and the budget."""

from .budget import Division, divide
from .disk_speed import disk_rates, read_rate
from .embedding import EmbeddingRows, require_in_vocabulary
from .governor import Governor, machine_reading
from .lease import Lease
from .ledger import ALLOCATOR_RESERVE, Ledger
from .memory import auto_budget, machine_memory, parse_size, show_size
from .policies import policy_names
from .prefetch import PREFETCH
from .provider import ExpertProvider
from .read_pool import ReadPool
from .read_threads import ReadThreads
from .wiring import wire

__all__ = [
    "ALLOCATOR_RESERVE",
    "PREFETCH",
    "Division",
    "EmbeddingRows",
    "ExpertProvider",
    "Governor",
    "Lease",
    "Ledger",
    "ReadPool",
    "ReadThreads",
    "auto_budget",
    "disk_rates",
    "divide",
    "machine_memory",
    "machine_reading",
    "parse_size",
    "policy_names",
    "read_rate",
    "require_in_vocabulary",
    "show_size",
    "wire",
]
