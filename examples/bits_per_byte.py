"""Bits per byte of a store on the demo's held-out chapters: `python examples/bits_per_byte.py [STORE] [--corpus FILE]`.

Each chapter is cut into runs of 511 tokens, each run starts a fresh state behind <|endoftext|>, and the -log2 p of the
run's tokens are divided by the UTF-8 bytes of the chapters. training.json states the same figure for the checkpoint.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import mlx.core as mx
import numpy as np
from demo_corpus import END_OF_TEXT, read_chapters, split_chapters

import mlx_ttd

RUN = 511


def nats(llm: mlx_ttd.LLM, start: int, run: list[int]) -> float:
    """-log p of `run` behind the token `start`, with a fresh state."""
    model = llm.model
    hidden = model.hidden_states(model.embed(np.array([start, *run[:-1]])), model.make_cache(), "prefill")
    logits = model.logits(hidden, "prefill")
    chosen = mx.take_along_axis(logits, mx.array(run)[:, None], axis=-1)[:, 0]
    return float(mx.sum(mx.logsumexp(logits, axis=-1) - chosen))


def bits_per_byte(llm: mlx_ttd.LLM, texts: list[str]) -> float:
    """Bits per UTF-8 byte of `texts`."""
    start = llm.tokenizer.token_id(END_OF_TEXT)
    assert start is not None
    total = 0.0
    for text in texts:
        ids = llm.encode(text)
        total += sum(nats(llm, start, ids[i : i + RUN]) for i in range(0, len(ids), RUN))
    return total / math.log(2) / sum(len(text.encode()) for text in texts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", nargs="?", default="demo")
    parser.add_argument("--corpus", type=Path, help="a file of verses; else Debian's bible program is asked")
    arguments = parser.parse_args()
    texts = [chapter.text for chapter in split_chapters(read_chapters(arguments.corpus)).test]
    with mlx_ttd.load(arguments.store, "300MB") as llm:
        print(f"{bits_per_byte(llm, texts):.4f} bits per byte over {len(texts)} chapters")


if __name__ == "__main__":
    main()
