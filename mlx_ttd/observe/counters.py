"""What a run did, counted where it happens."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass
class Counters:
    """Cumulative counts of one model.

    requests: expert choices asked of the provider, each (layer, expert) once a call; hits and misses split them.
    records, bytes_read, read_seconds: what preads of expert records returned, and time with a read in flight.
    wait_seconds: time the step stood still for reads. embedding_bytes: rows read for the embedding.
    resident_bytes: weights read at load. host_syncs: times the host waited for the device inside a step.
    launches: of own kernels on a GPU. weight_bytes_copied: of weights that steps converted to multiply by them, or sent
    to a GPU's own memory. reallocations: banks that were given other memory after load.
    prefetched, prefetch_used: records read on a guess at the next layer's choice, and those that it then chose.
    shrinks: times the banks gave slots back because the machine was short of memory; regrowths: took some again.
    """

    requests: int = 0
    hits: int = 0
    misses: int = 0
    records: int = 0
    bytes_read: int = 0
    read_seconds: float = 0.0
    wait_seconds: float = 0.0
    embedding_bytes: int = 0
    resident_bytes: int = 0
    host_syncs: int = 0
    launches: int = 0
    weight_bytes_copied: int = 0
    reallocations: int = 0
    decode_steps: int = 0
    prefill_tokens: int = 0
    shrinks: int = 0
    regrowths: int = 0
    prefetched: int = 0
    prefetch_used: int = 0

    def copy(self) -> Counters:
        return Counters(**{f.name: getattr(self, f.name) for f in fields(self)})

    def since(self, before: Counters) -> Counters:
        """The counts between `before` and now."""
        return Counters(**{f.name: getattr(self, f.name) - getattr(before, f.name) for f in fields(self)})
