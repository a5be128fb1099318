"""The demo model's training runs: it makes a checkpoint that converts and generates."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

import mlx_ttd

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def verses(chapters: int, rng: random.Random) -> str:
    """A corpus of one book in made-up words, enough of them to fill the vocabulary."""
    syllables = [a + b for a in "bdfghklmnprstvwz" for b in ("a", "e", "i", "o", "u", "an", "el", "or")]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 3))) for _ in range(4000)]
    return "".join(
        f"Ge{chapter}:{verse} {' '.join(rng.choices(words, k=12)).capitalize()}.\n"
        for chapter in range(1, chapters + 1)
        for verse in range(1, 26)
    )


@pytest.mark.slow
@pytest.mark.oracle
def test_training_script_makes_a_checkpoint_that_converts_and_generates(tmp_path):
    (tmp_path / "corpus.txt").write_text(verses(60, random.Random(0)))
    brief = ["--steps", "2", "--mtp-steps", "2", "--batch", "1", "--conversations", "40", "--device", "cpu"]
    command = [sys.executable, EXAMPLES / "train_demo.py", "checkpoint", "--corpus", "corpus.txt", *brief]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "checkpoint/training.json").read_text())
    assert report["parameters"] > 8_000_000
    assert report["bits_per_byte"] < 8

    store = mlx_ttd.convert(tmp_path / "checkpoint", tmp_path / "demo.ttd")
    mlx_ttd.verify(store)
    with mlx_ttd.load(store) as llm:
        assert len(llm.generate("Bala", max_tokens=4, ignore_eos=True).tokens) == 4
