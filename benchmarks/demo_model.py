"""Bits per byte of the demo model on the chapters that it never saw: `python -m benchmarks.demo_model [--json FILE]`.

As examples/bits_per_byte.py, which says what it needs; less than a minute.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

import mlx_ttd
from benchmarks import command
from benchmarks.block import Block
from benchmarks.commits import ROOT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, help="a file of verses; else Debian's bible program is asked")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT / "examples"))
    example, corpus = (importlib.import_module(name) for name in ("bits_per_byte", "demo_corpus"))
    texts = [chapter.text for chapter in corpus.split_chapters(corpus.read_chapters(arguments.corpus)).test]
    block = Block("demo_model", {"chapters": len(texts)})
    with mlx_ttd.load("demo", "300MB") as llm:
        block.results["int4.bits_per_byte"] = example.bits_per_byte(llm, texts)
    block.finish(arguments.json)


if __name__ == "__main__":
    command.run(main)
