"""A store of a real model's shapes with random weights, written at the disk's speed.

    python -m benchmarks.synthetic_store qwen3.6-35b-a3b DST [--layers N] [--skew S] [--head-bits 16|8|4] [--seed N]

All 40 layers take 21 GB. Weights have the spread of a fresh initialisation, so that hidden states and logits keep their
size from layer to layer. Embeddings share a direction to which routers lean by `skew`: some experts are then wanted
often, and consecutive tokens share experts.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mlx_ttd.errors import ConversionError
from mlx_ttd.spec import Matrix, Quantisation, Tensor, model_spec, read_json, text_config, trunk_tensors
from mlx_ttd.store.checkpoint import Checkpoint
from mlx_ttd.store.digest import sha256
from mlx_ttd.store.encodings import Plain
from mlx_ttd.store.format import CONFIG, MANIFEST, RECORDS
from mlx_ttd.store.journal import Journal
from mlx_ttd.store.manifest import Copied, FileEntry, Manifest
from mlx_ttd.store.pipeline import behind
from mlx_ttd.store.plan import Plan, PlannedFile, PlannedTensor, make_plan
from mlx_ttd.store.policy import load_policy
from mlx_ttd.store.sources import Source, Sources
from mlx_ttd.store.writer import FileWriter

SHAPES = Path(__file__).parent / "shapes"
SPREAD, EMBEDDING_SPREAD, SHARED = 0.02, 0.5, 0.25
POOL, RANGE = 1 << 25, 1 << 23
SKEW = 2.4
BRANCH_ENDS = ("attn.o", "gdn.out", "moe.down", "shared.down", "mlp.down")

Piece = tuple[str | int, int, memoryview]


def bf16(values: np.ndarray) -> np.ndarray:
    """f32 values as the uint16 bits of bfloat16, rounded half up."""
    return ((values.astype(np.float32).view(np.uint32) + 0x8000) >> 16).astype(np.uint16)


class Draws:
    """Random bytes and numbers cut from pools at random places: every cut differs and costs one copy."""

    def __init__(self, seed: int, layers: int, hidden: int, skew: float):
        pool = np.random.default_rng(seed)
        self.seed, self.layers, self.skew = seed, layers, skew
        self.bytes = pool.integers(0, 256, POOL, np.uint8)
        self.normal = pool.standard_normal(POOL // 2, np.float32)
        self.plain = bf16(self.normal * np.float32(SPREAD))
        self.shared = np.where(pool.random(hidden) < 0.5, -1.0, 1.0).astype(np.float32)
        self.jitter = pool.uniform(0.5, 1.5, POOL // 16).astype(np.float32)
        self.scales: dict[tuple[int, float], tuple[np.ndarray, np.ndarray]] = {}

    def begin(self, part: int) -> None:
        """Start the cuts of one file, so that a file's bytes do not depend on the others."""
        self.place = np.random.default_rng((self.seed, part))

    def cut(self, pool: np.ndarray, count: int) -> np.ndarray:
        start = int(self.place.integers(0, len(pool) - count + 1))
        return pool[start : start + count]

    def spread(self, role: str) -> float:
        return SPREAD / (2 * self.layers) ** 0.5 if role in BRANCH_ENDS else SPREAD

    def packed(self, role: str, q: Quantisation, codes: int, groups: int) -> list[np.ndarray]:
        """Bytes of `codes` bytes of codes and of the scales and biases of `groups` groups, centred on zero."""
        key = q.bits, self.spread(role)
        if key not in self.scales:
            scale = bf16(self.jitter * np.float32(key[1] * 12**0.5 / 2**q.bits))
            exact = (scale.astype(np.uint32) << 16).view(np.float32)
            self.scales[key] = scale, bf16(exact * np.float32(-(2**q.bits - 1) / 2))
        start = int(self.place.integers(0, len(self.jitter) - groups + 1))
        chosen = [pool[start : start + groups].view(np.uint8) for pool in self.scales[key]]
        return [self.cut(self.bytes, codes), *chosen]

    def plain_rows(self, tensor: Tensor, rows: int) -> np.ndarray:
        """`rows` rows of a tensor that stays bf16, as bytes."""
        shape = (rows, *tensor.shape[1:])
        count = int(np.prod(shape))
        if tensor.role in ("embedding", "moe.router"):
            values = self.cut(self.normal, count).reshape(shape)
            if tensor.role == "embedding":
                return bf16(values * np.float32(EMBEDDING_SPREAD) + self.shared * np.float32(SHARED)).view(np.uint8)
            wanted = self.place.standard_normal((rows, 1)).astype(np.float32) * np.float32(self.skew / shape[1] ** 0.5)
            return bf16((values + wanted * self.shared) * np.float32(SPREAD)).view(np.uint8)
        if tensor.role == "gdn.conv":
            return bf16(self.place.uniform(-0.5, 0.5, shape)).view(np.uint8)
        if tensor.role == "gdn.a_log":
            return bf16(np.log(self.place.uniform(1, 16, shape))).view(np.uint8)
        if tensor.role == "gdn.dt_bias":
            return bf16(np.log(np.expm1(np.exp(self.place.uniform(np.log(1e-3), np.log(0.1), shape))))).view(np.uint8)
        if tensor.kind == "plain_norm":
            return bf16(np.ones(shape)).view(np.uint8)
        return self.cut(self.plain, count).view(np.uint8)


def dense_pieces(draws: Draws, planned: PlannedTensor) -> Iterator[Piece]:
    tensor, q = planned.source.tensor, planned.target
    rows, cols = tensor.shape[0], int(np.prod(tensor.shape[1:]))
    step = max(1, RANGE // cols)
    for start in range(0, rows, step):
        count = min(step, rows - start)
        if q is None:
            parts = [draws.plain_rows(tensor, count)]
        else:
            parts = draws.packed(tensor.role, q, count * q.row_bytes(cols), count * cols // q.group)
        for suffix, part in zip(("", ".scales", ".biases"), parts, strict=False):
            flat = part.reshape(-1)
            yield tensor.name + suffix, start * (len(flat) // count), flat.data


def expert_pieces(draws: Draws, file: PlannedFile) -> Iterator[Piece]:
    assert file.layout is not None
    stride = file.layout.stride

    def fill(record: np.ndarray, role: str, matrix: Matrix) -> None:
        q = Quantisation(matrix.bits, matrix.group)
        parts = draws.packed(role, q, matrix.codes_bytes, matrix.rows * matrix.groups)
        for offset, part in zip((matrix.codes, matrix.scales, matrix.biases), parts, strict=True):
            assert offset is not None
            record[offset : offset + len(part)] = part

    for expert in range(file.header.tensors[RECORDS].shape[0]):
        record = np.zeros(stride, np.uint8)
        fill(record, "moe.gate_up", file.layout.gate_up)
        fill(record, "moe.down", file.layout.down)
        yield expert, expert * stride, record.data


def write_file(draws: Draws, file: PlannedFile) -> FileEntry:
    writer = FileWriter(file.header)
    try:
        with behind(writer.write) as write:
            if file.layout is None:
                pieces: Iterator[Piece] = (piece for t in file.tensors for piece in dense_pieces(draws, t))
            else:
                pieces = expert_pieces(draws, file)
            for part, position, data in pieces:
                write(part, position, data)
        return writer.finish()
    finally:
        writer.close()


def read_shape(shape: str | Path, layers: int | None = None, experts: int | None = None) -> dict[str, Any]:
    """The config of a named shape (benchmarks/shapes) or of a config.json, with as many layers and experts as asked."""
    named = SHAPES / f"{shape}.json"
    config = read_json(named if named.is_file() else Path(shape))
    inner = config.get("text_config", config)
    if experts is not None:
        inner["num_experts"] = experts
    if layers is not None:
        inner["num_hidden_layers"] = layers
        if "layer_types" in inner:
            inner["layer_types"] = inner["layer_types"][:layers]
    return config


def plan_store(config: dict[str, Any], head_bits: int | None, embed_bits: int | None, root: Path) -> Plan:
    """The files of the store under `root`; nothing is written."""
    spec = model_spec(config)
    sources = {t.name: Source(t, (), Plain("BF16"), ()) for t in trunk_tensors(spec)}
    policy = load_policy("int4", head_bits, embed_bits, spec.tied)
    return make_plan(Checkpoint(root, config, spec, {}, ""), Sources("synthetic", "w", False, sources), policy, root)


def check_space(needed: int, where: Path) -> None:
    """ConversionError when `where` has less than `needed` bytes and 1 GB free."""
    free = shutil.disk_usage(where).free
    if free < needed + 10**9:
        raise ConversionError(f"{where} has {free / 1e9:.1f} GB free; {needed / 1e9 + 1:.1f} GB are needed.")


def write_store(
    shape: str | Path,
    dst: Path,
    layers: int | None = None,
    skew: float = SKEW,
    head_bits: int | None = None,
    seed: int = 0,
    experts: int | None = None,
    embed_bits: int | None = None,
    progress: bool = False,
) -> Path:
    """Write the store `dst`; the same call after an interruption resumes. Raises ConversionError, ConfigError."""
    if dst.exists():
        raise ConversionError(f"{dst} exists already; give another name or remove it.")
    config = read_shape(shape, layers, experts)
    text = json.dumps(config, indent=1) + "\n"
    spec, count = model_spec(config), text_config(config)["num_hidden_layers"]
    identity = sha256(f"{text}\n{skew} {head_bits} {embed_bits} {seed}".encode())
    source: dict[str, str | None] = {"importer": "synthetic", "seed": str(seed), "skew": str(skew)}
    with Journal(dst.with_name(dst.name + ".partial")) as journal:
        plan = plan_store(config, head_bits, embed_bits, journal.store)
        done = journal.resume(identity, plan)
        check_space(sum(f.header.file_bytes for name, f in plan.files.items() if name not in done), journal.store)
        draws = Draws(seed, count, spec.hidden, skew)
        for part, (name, file) in enumerate(plan.files.items()):
            if name in done:
                continue
            began = time.perf_counter()
            draws.begin(part)
            done[name] = write_file(draws, file)
            journal.record(name, done[name])
            if progress:
                rate = file.header.file_bytes / (time.perf_counter() - began) / 1e9
                print(f"{name}: {file.header.file_bytes / 1e9:.2f} GB at {rate:.2f} GB/s", flush=True)
        layouts = tuple(f.layout for f in plan.files.values() if f.layout is not None) or (None,) * count
        files = {name: done[name] for name in plan.files}
        copied = {CONFIG: Copied(len(text.encode()), sha256(text.encode()))}
        manifest = Manifest(source, "int4", "w", plan.quantisation(), layouts, False, None, files, copied)
        (journal.store / CONFIG).write_text(text)
        (journal.store / MANIFEST).write_text(manifest.to_text())
        journal.publish(dst)
    return dst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", help=f"one of {', '.join(p.stem for p in SHAPES.glob('*.json'))}, or a config.json")
    parser.add_argument("dst", type=Path)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--skew", type=float, default=SKEW, help="0: experts are wanted about evenly")
    parser.add_argument("--head-bits", type=int, choices=(16, 8, 4))
    parser.add_argument("--seed", type=int, default=0)
    arguments = vars(parser.parse_args())
    began = time.perf_counter()
    dst = write_store(**arguments, progress=True)
    total = sum(f.stat().st_size for f in dst.rglob("*") if f.is_file())
    seconds = time.perf_counter() - began
    print(f"{dst}: {total / 1e9:.2f} GB in {seconds:.0f} s, {total / seconds / 1e9:.2f} GB/s")


if __name__ == "__main__":
    main()
