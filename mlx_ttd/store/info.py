"""What is in a store and what its parts cost, from headers alone."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

from ..spec import FULL
from .format import EMBEDDING, RESIDENT, tensors_of
from .reader import Store, open_store


def _role_bytes(store: Store) -> dict[str, int]:
    """Bytes of each role in memory (head, attn.q, ...), its scales and biases included, largest first."""
    sizes: Counter[str] = Counter()
    for tensor in tensors_of(store.spec, RESIDENT):
        parts = (store.resident.get(tensor.name + suffix) for suffix in ("", ".scales", ".biases"))
        sizes[tensor.role] += sum(part.nbytes for part in parts if part is not None)
    return dict(sizes.most_common())


def _precision(store: Store, name: str) -> str:
    q, found = store.quantisation(name), store.resident.get(name) or store.embedding.get(name)
    if q is not None:
        return f"{q.mode} {q.bits}-bit group {q.group}"
    return found.dtype if found is not None else "none"


def info(path: str | os.PathLike[str], follow_links: bool = False) -> dict[str, Any]:
    """Describe a store as JSON-ready values; sizes are bytes. follow_links: whether links may lead outside it.

    `resident_bytes` is what every token uses, `record_strides` the size of one expert's record in each layer (0 where
    there is none), `bytes_per_token` what a token reads when no expert is in memory.
    """
    store = open_store(path, follow_links)
    spec, manifest = store.spec, store.manifest
    strides = [0 if layout is None else layout.stride for layout in store.layouts]
    sizes = {name: entry.bytes for name, entry in manifest.files.items()}
    experts = sum(size for name, size in sizes.items() if name.startswith("experts/layer-"))
    return {
        "path": str(store.path),
        "digest": store.digest,
        "model_type": spec.model_type,
        "source": manifest.source,
        "policy": manifest.policy,
        "norms": store.norms,
        "hidden": spec.hidden,
        "vocab": spec.vocab,
        "layers": len(spec.layer_types),
        "full_attention_layers": spec.layer_types.count(FULL),
        "experts": spec.experts,
        "top_k": spec.top_k,
        "tied_head": spec.tied,
        "max_context": spec.max_context,
        "mtp": manifest.mtp,
        "precision": {
            "head": _precision(store, "embedding" if spec.tied else "head"),
            "embedding": _precision(store, "embedding"),
            "experts": sorted(
                {f"{m.mode} {m.bits}-bit group {m.group}" for x in store.layouts if x for m in (x.gate_up, x.down)}
            ),
        },
        "total_bytes": sum(sizes.values()),
        "parts": {
            "resident": sizes[RESIDENT],
            "embedding": sizes.get(EMBEDDING, 0),
            "experts": experts,
            "mtp": sum(sizes.values()) - sizes[RESIDENT] - sizes.get(EMBEDDING, 0) - experts,
        },
        "resident_bytes": store.resident_bytes,
        "resident_bytes_by_role": _role_bytes(store),
        "mtp_resident_bytes": store.mtp.resident_bytes if store.mtp else 0,
        "record_strides": strides,
        "bytes_per_token": spec.top_k * store.expert_bytes,
        "kv_bytes_per_position_bf16": spec.kv_bytes_per_token(16),
        "recurrent_state_bytes_f32": spec.recurrent_bytes(4),
    }
