"""The store that a conversion would make, described from the checkpoint's headers alone; nothing is written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from .checkpoint import Checkpoint, open_checkpoint
from .format import EMBEDDING, RESIDENT, Norms
from .hub import is_hub_id, open_hub_checkpoint
from .manifest import Manifest
from .own_head import with_own_head
from .plan import Plan, make_plan
from .policy import load_policy
from .reader import Store
from .sources import match

# Sizes are the same whatever the norms hold, and their values need not be fetched.
NORMS: Norms = "w"


def store_of_plan(checkpoint: Checkpoint, plan: Plan) -> Store:
    """The store of `plan` as far as sizes and shapes go: it has no digests, no files, and cannot be loaded."""
    spec, files = checkpoint.spec, plan.files
    layouts = [file.layout for file in files.values() if file.layout is not None][: len(spec.layer_types)]
    trunk = tuple(layouts) or (None,) * len(spec.layer_types)
    manifest = Manifest({}, "", "w", plan.quantisation(), trunk, False, None, {}, {})
    embedding = files[EMBEDDING].header.tensors if EMBEDDING in files else {}
    return Store(checkpoint.path, spec, checkpoint.config, manifest, "", files[RESIDENT].header.tensors, embedding)


def planned_store(
    source: str | os.PathLike[str],
    head_bits: int | None = None,
    embed_bits: int | None = None,
    policy: str | None = None,
) -> Store:
    """What `convert` would make of a checkpoint directory or hub id. Of a hub id, headers and small files are fetched.

    Raises CheckpointError, ConfigError, OptionError.
    """
    with tempfile.TemporaryDirectory() as cache:
        if is_hub_id(source):
            opened: Checkpoint = open_hub_checkpoint(str(source), None, Path(cache), lambda done: None)
        else:
            opened = open_checkpoint(source)
        with opened as found:
            checkpoint = with_own_head(found, whole=False)
            chosen = load_policy(policy, head_bits, embed_bits, checkpoint.spec.tied)
            return store_of_plan(checkpoint, make_plan(checkpoint, match(checkpoint, NORMS), chosen, checkpoint.path))
