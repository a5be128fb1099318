"""Logits that transformers gave, for machines without it: `python tests/goldens.py` writes tests/goldens/*.npz anew."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import checkpoints
import numpy as np

import mlx_ttd
from mlx_ttd.store import Store, open_store

FOLDER = Path(__file__).parent / "goldens"
PASSAGE = (
    "And it came to pass in those days, that there went out a decree from Caesar Augustus, that all the "
    "world should be taxed. And all went to be taxed, every one into his own city. And Joseph also went "
    "up from Galilee, out of the city of Nazareth, into Judaea, unto the city of David, which is called "
    "Bethlehem; to be taxed with Mary his espoused wife, being great with child. And so it was, that, "
    "while they were there, the days were accomplished."
)
KEPT = 16
GREEDY = 64
TRACED = 8
TINY = {
    "moe": (checkpoints.MOE, 20),
    "dense": (checkpoints.DENSE, 21),
    "tied": (checkpoints.TIED, 22),
}


def demo_tokens(store: Store) -> list[int]:
    from mlx_ttd.text import Tokenizer

    return Tokenizer(store.path).encode(PASSAGE)


def tiny_store(name: str, folder: Path) -> Store:
    config, seed = TINY[name]
    return open_store(mlx_ttd.convert(checkpoints.tiny(folder / "checkpoint", config, seed), folder / "store.ttd"))


def tiny_tokens(store: Store) -> list[int]:
    return np.random.default_rng(7).integers(0, store.spec.vocab, 65).tolist()


def main() -> None:
    import oracle

    FOLDER.mkdir(exist_ok=True)
    store = open_store(mlx_ttd.demo_path())
    model, tokens = oracle.model_of(store), demo_tokens(store)
    logits = oracle.oracle_logits(model, tokens)[-KEPT:]
    np.savez_compressed(
        FOLDER / "demo.npz", logits=logits, greedy=oracle.greedy(model, tokens, GREEDY), digest=store.digest
    )
    shutil.rmtree(FOLDER / "trace", ignore_errors=True)
    oracle.trace(model, store, tokens[:TRACED]).save(FOLDER / "trace")
    for name in TINY:
        with tempfile.TemporaryDirectory() as folder:
            store = tiny_store(name, Path(folder))
            tokens = tiny_tokens(store)
            logits = oracle.oracle_logits(oracle.model_of(store), tokens)
        np.savez_compressed(FOLDER / f"{name}.npz", logits=logits)


if __name__ == "__main__":
    main()
