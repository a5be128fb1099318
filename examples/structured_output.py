"""Output that cannot but be one of a few JSON values: `python examples/structured_output.py`.

A processor gets the tokens so far and the f32 logits [vocab], and returns logits: what it sets to -inf cannot come.
A library for grammars plugs in the same way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import mlx.core as mx

import mlx_ttd


def one_of(llm: mlx_ttd.LLM, prompt: str, choices: Sequence[object]) -> Callable[[list[int], mx.array], mx.array]:
    """A processor that lets only the JSON of one of `choices` come, and then the end."""
    start = len(llm.encode(prompt))
    end = llm.tokenizer.token_id("<|im_end|>")
    written = [[*llm.tokenizer.encode(json.dumps(choice)), end] for choice in choices]

    def allow(tokens: list[int], logits: mx.array) -> mx.array:
        so_far = list(tokens[start:])
        following = {ids[len(so_far)] for ids in written if ids[: len(so_far)] == so_far and len(ids) > len(so_far)}
        allowed = mx.zeros(logits.shape, mx.bool_)
        allowed[mx.array(sorted(following))] = True
        return mx.where(allowed, logits, -mx.inf)

    return allow


def main() -> None:
    prompt = "And God called the dry land"
    choices = [{"name": "Earth"}, {"name": "Seas"}, {"name": "Heaven"}]
    with mlx_ttd.load("demo", memory="150MB") as llm:
        answer = llm.generate(prompt, max_tokens=40, processors=[one_of(llm, prompt, choices)])
    print(json.loads(answer.text))


if __name__ == "__main__":
    main()
