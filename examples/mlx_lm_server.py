"""mlx-lm's OpenAI-compatible server on a streamed model: `python examples/mlx_lm_server.py [STORE] [SERVER OPTIONS]`.

It answers one request after another, since a streamed model runs one sequence at a time.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from mlx_lm import server
from mlx_lm.tokenizer_utils import load as load_tokenizer

import mlx_ttd
from mlx_ttd.spec import read_json


def main(store: str = "demo", *options: str) -> None:
    with mlx_ttd.load(store) as llm:

        def load(path: str | Path, *arguments: Any, **keywords: Any) -> tuple[Any, ...]:
            return llm.model, load_tokenizer(llm.store.path), read_json(llm.store.path / "config.json")

        sys.argv = ["mlx_lm.server", "--model", str(llm.store.path), *options]
        with patch.object(server, "load", load):
            server.main()


if __name__ == "__main__":
    main(*sys.argv[1:])
