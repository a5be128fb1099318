"""mlx-lm's own loop on a streamed model: `python examples/mlx_lm_generate.py [STORE] [PROMPT]`.

`llm.model` and `llm.tokenizer` follow mlx-lm's protocol, so its samplers, processors and stream_generate work as on a
model of its own. The wrapper, which mlx-lm would make itself, is told every token that ends a text, not just one.
"""

from __future__ import annotations

import sys

import mlx_lm
from mlx_lm.tokenizer_utils import TokenizerWrapper

import mlx_ttd
from mlx_ttd.outputs import ends_of


def main(store: str = "demo", prompt: str = "In the beginning") -> None:
    with mlx_ttd.load(store) as llm:
        tokenizer = TokenizerWrapper(llm.tokenizer, eos_token_ids=ends_of(llm.store.path, llm.tokenizer))
        for piece in mlx_lm.stream_generate(llm.model, tokenizer, prompt, max_tokens=60):
            print(piece.text, end="", flush=True)
        print()


if __name__ == "__main__":
    main(*sys.argv[1:])
