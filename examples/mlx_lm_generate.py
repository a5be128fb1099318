"""mlx-lm's own loop on a streamed model: `python examples/mlx_lm_generate.py [STORE] [PROMPT]`.

`llm.model` follows mlx-lm's protocol, so its samplers, processors and stream_generate work as on a model of its own.
"""

from __future__ import annotations

import sys

import mlx_lm
from mlx_lm.tokenizer_utils import load as load_tokenizer

import mlx_ttd


def main(store: str = "demo", prompt: str = "In the beginning") -> None:
    with mlx_ttd.load(store) as llm:
        tokenizer = load_tokenizer(llm.store.path)
        for piece in mlx_lm.stream_generate(llm.model, tokenizer, llm.encode(prompt), max_tokens=60):
            print(piece.text, end="", flush=True)
        print()


if __name__ == "__main__":
    main(*sys.argv[1:])
