"""A bf16 checkpoint of a real model's shapes with few layers, its values repeated from one random block.

python -m benchmarks.bf16_checkpoint qwen3.6-35b-a3b DST --layers 4      1.7 GB a layer and 2 GB of embedding and head
"""

from __future__ import annotations

import argparse
import json
from math import prod
from pathlib import Path

import numpy as np

from benchmarks.synthetic_store import SPREAD, bf16, read_shape
from mlx_ttd.spec import model_spec, trunk_tensors
from mlx_ttd.store.importers.base import row_count
from mlx_ttd.store.importers.hf import HF

BLOCK_BYTES = 32 << 20
PREFIX = "model.language_model."


def write_checkpoint(shape: str | Path, dst: Path, layers: int = 4) -> Path:
    """The directory `dst` with a config and one safetensors file, named as the published models are."""
    config = read_shape(shape, layers)
    config.get("text_config", config).pop("mtp_num_hidden_layers", None)
    spec = model_spec(config)
    header, offset = {}, 0
    for tensor in trunk_tensors(spec):
        place = "" if tensor.name == "head" else PREFIX
        place += "" if tensor.layer is None else f"layers.{tensor.layer}."
        ways = [moves[0] for moves in HF.alternatives(spec, tensor) if len(moves) == 1]
        rows = next(way for way in ways if (way.start, way.stop) == (0, row_count(way.shape)))
        end = offset + 2 * prod(rows.shape)
        header[place + rows.name] = {"dtype": "BF16", "shape": list(rows.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # as safetensors' own writer does, so that numbers are aligned
    block = bf16(np.random.default_rng(0).standard_normal(BLOCK_BYTES // 2, np.float32) * np.float32(SPREAD)).tobytes()
    dst.mkdir(parents=True, exist_ok=True)
    (dst / "config.json").write_text(json.dumps(config))
    with open(dst / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for start in range(0, offset, BLOCK_BYTES):
            file.write(block[: min(BLOCK_BYTES, offset - start)])
    return dst


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape")
    parser.add_argument("dst", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    write_checkpoint(**vars(parser.parse_args()))
