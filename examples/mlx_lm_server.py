"""mlx-lm's OpenAI-compatible server on a streamed model: `python examples/mlx_lm_server.py [STORE] [SERVER OPTIONS]`.

It answers one request after another, since a streamed model runs one sequence at a time. An answer ends where the
context does, with finish_reason "length"; a prompt that is longer by itself is answered with status 400.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from mlx_lm import server
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_tokenizer

import mlx_ttd
from mlx_ttd.outputs import ends_of
from mlx_ttd.spec import read_json

ReadRequest = Callable[[server.APIHandler], server.CompletionRequest]


def prompt_length(handler: server.APIHandler, request: server.CompletionRequest, tokenizer: TokenizerWrapper) -> int:
    """Tokens of a request's prompt."""
    if request.request_type != "chat":
        return len(tokenizer.encode(request.prompt))
    variables = handler.response_generator.cli_args.chat_template_args | (handler.chat_template_kwargs or {})
    server.process_message_content(request.messages)
    return len(
        tokenizer.apply_chat_template(request.messages, tools=request.tools, add_generation_prompt=True, **variables)
    )


def within(context: int, tokenizer: TokenizerWrapper, read: ReadRequest) -> ReadRequest:
    """`read`, a handler's method, with max_tokens cut to what `context` leaves; the server makes 400 of its errors."""

    def read_within(handler: server.APIHandler) -> server.CompletionRequest:
        request = read(handler)
        length = prompt_length(handler, request, tokenizer)
        if length >= context:
            raise ValueError(f"the prompt has {length:,} tokens and the context holds {context:,}; shorten it.")
        handler.max_tokens = min(handler.max_tokens, context - length)
        return request

    return read_within


def main(store: str = "demo", *options: str) -> None:
    with mlx_ttd.load(store) as llm:
        tokenizer = load_tokenizer(llm.store.path, eos_token_ids=ends_of(llm.store.path, llm.tokenizer))

        def load(path: str | Path, *arguments: Any, **keywords: Any) -> tuple[Any, ...]:
            return llm.model, tokenizer, read_json(llm.store.path / "config.json")

        names = "handle_chat_completions", "handle_text_completions"
        reads = {name: within(llm.context, tokenizer, getattr(server.APIHandler, name)) for name in names}
        sys.argv = ["mlx_lm.server", "--model", str(llm.store.path), *options]
        with (
            patch.object(server, "load", load),
            patch.object(server.ResponseGenerator, "_is_batchable", lambda *_: False),
            patch.multiple(server.APIHandler, **reads),
        ):
            server.main()


if __name__ == "__main__":
    main(*sys.argv[1:])
