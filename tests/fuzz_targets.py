"""Every reader of untrusted files, with intact files to start from."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mutations
import numpy as np
import tokenizers
from checkpoints import MOE, tiny
from hub_answers import answering, honest_answers
from safetensors.numpy import load_file
from tokenizers import decoders, models, normalizers, pre_tokenizers
from vocabulary import TEMPLATE, write_byte_tokenizer

import mlx_ttd
from mlx_ttd import state
from mlx_ttd.errors import TTDError
from mlx_ttd.generation import read_generation_defaults
from mlx_ttd.observe import Trace, first_difference, incomparable, load_trace
from mlx_ttd.spec import model_spec
from mlx_ttd.state.saving import arrays_of
from mlx_ttd.store import open_store
from mlx_ttd.store.checkpoint import INDEX, open_checkpoint
from mlx_ttd.store.hub import open_hub_checkpoint
from mlx_ttd.store.hub_patience import Patience
from mlx_ttd.store.safetensors_file import HEADER_LIMIT, make_header
from mlx_ttd.store.sources import match
from mlx_ttd.text import Limits, Tokenizer, read_templates, render

TEXT = "In the beginning, God's 42 works: <|im_start|> é \U0001f30d"
MESSAGES = [
    {"role": "user", "content": "Genesis 1:1"},
    {"role": "assistant", "content": "<think>\n\n</think>\n\nIn the beginning"},
    {"role": "user", "content": "And then?"},
]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


@dataclass(frozen=True)
class Target:
    """A reader and where its untrusted file lies. `place` writes an input.

    limits: what the process where it renders a template is held to; the only one that a reader may start or end.
    writes: the one folder that it may write in.
    held: bytes of the largest file that an input may have read beside itself.
    """

    make: mutations.Make
    seeds: Sequence[bytes]
    place: Callable[[bytes], Any]
    read: Callable[[], Any]
    limits: Limits | None = None
    writes: Path | None = None
    held: int = 0


def place_sparse(path: Path) -> Callable[[bytes], None]:
    """Writes a safetensors file, with as many bytes behind it as it claims where these are more than are ever read."""

    def place(data: bytes) -> None:
        path.write_bytes(data)
        claimed = int.from_bytes(data[:8], "little")
        if HEADER_LIMIT < claimed < 1 << 40:
            os.truncate(path, 8 + claimed)

    return place


def put(place: Path, kind: str, end: str) -> None:
    """Put something of `kind` where a file may be."""
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(os.path.relpath(place))
    elif kind == "directory":
        place.mkdir()
    elif kind == "link":
        place.symlink_to(end)
    elif kind != "missing":
        place.write_bytes(
            {"pointer": mutations.POINTER, "huge header": (300 << 20).to_bytes(8, "little")}.get(kind, b"")
        )
        if kind.startswith("huge"):
            os.truncate(place, 1 << 32)


def file_kinds(whole: Path, read: Callable[[Path, bool], object]) -> Target:
    """Directories like `whole` with something else in the place of some files; another one like it is beside."""
    folder, follow = whole.parent / "store", False
    shutil.copytree(whole, whole.parent / "other")

    def place(data: bytes) -> None:
        nonlocal follow
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder, copy_function=os.link)
        with suppress(json.JSONDecodeError):
            placed = json.loads(data)
            follow = placed["follow"]
            for name, kind, end in placed["places"]:
                with suppress(OSError):
                    put(folder / name, kind, end)

    def read_everything() -> None:
        """Each reader meets what lies there, though one before it has refused."""
        errors = []
        tokenizer = Tokenizer(folder)
        for one in (
            lambda: read(folder, follow),
            lambda: read_generation_defaults(folder),
            lambda: tokenizer.encode("a"),
            lambda: tokenizer.templates,
        ):
            try:
                one()
            except TTDError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    held = max(path.stat().st_size for path in whole.rglob("*"))
    return Target(mutations.places, [b'{"follow": false, "places": []}'], place, read_everything, held=held)


def store_places(folder: Path) -> Target:
    return file_kinds(shutil.copytree(mlx_ttd.demo_path(), folder / "whole"), open_store)


def checkpoint_places(folder: Path) -> Target:
    whole = tiny(folder / "whole")
    write_byte_tokenizer(whole)
    return file_kinds(whole, lambda path, follow: match(open_checkpoint(path)))


def manifest(folder: Path) -> Target:
    path = shutil.copytree(mlx_ttd.demo_path(), folder / "store") / "manifest.json"
    return Target(mutations.json_text, [path.read_bytes()], path.write_bytes, lambda: open_store(path.parent))


def store_header(folder: Path) -> Target:
    path = shutil.copytree(mlx_ttd.demo_path(), folder / "store") / "mtp.safetensors"
    return Target(mutations.safetensors, [path.read_bytes()], place_sparse(path), lambda: open_store(path.parent))


def store_config(folder: Path) -> Target:
    path = shutil.copytree(mlx_ttd.demo_path(), folder / "store") / "config.json"
    return Target(mutations.json_text, [path.read_bytes()], path.write_bytes, lambda: open_store(path.parent))


def checkpoint_files(folder: Path, name: str, make: mutations.Make) -> Target:
    path = tiny(folder / "checkpoint") / name
    index = {"weight_map": {"a": "model.safetensors", "b": "model.safetensors"}}
    if name == INDEX:
        path.write_text(json.dumps(index))
    place = place_sparse(path) if path.suffix == ".safetensors" else path.write_bytes
    return Target(make, [path.read_bytes()], place, lambda: match(open_checkpoint(path.parent)))


def checkpoint_header(folder: Path) -> Target:
    return checkpoint_files(folder, "model.safetensors", mutations.safetensors)


def checkpoint_config(folder: Path) -> Target:
    return checkpoint_files(folder, "config.json", mutations.json_text)


def checkpoint_index(folder: Path) -> Target:
    return checkpoint_files(folder, INDEX, mutations.json_text)


def small_tokenizers() -> Iterator[bytes]:
    """One of each model and several of the steps around it."""
    words = {"[UNK]": 0, "in": 1, "the": 2, "##s": 3}
    for model, normalizer, split, decoder in (
        (models.WordLevel(words, unk_token="[UNK]"), normalizers.Replace("e", "ee"), pre_tokenizers.Whitespace(), None),
        (models.WordPiece(words, unk_token="[UNK]"), normalizers.BertNormalizer(), None, decoders.WordPiece()),
        (models.Unigram([("<unk>", 0.0), ("in", -1.0)], 0), normalizers.NFKC(), pre_tokenizers.Metaspace(), None),
    ):
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.normalizer = normalizer
        if split:
            tokenizer.pre_tokenizer = split
        if decoder:
            tokenizer.decoder = decoder
        yield tokenizer.to_str().encode()


def tokenizer_file(folder: Path) -> Target:
    path = write_byte_tokenizer(folder) / "tokenizer.json"

    def read() -> None:
        found = Tokenizer(folder)
        detokenizer = found.detokenizer()
        for token in [*found.encode(TEXT), 0, 3, 255, 300]:
            detokenizer.add(token)
        assert found.vocab_size >= 0
        assert found.eos_ids is not None

    return Target(mutations.json_text, [path.read_bytes(), *small_tokenizers()], path.write_bytes, read)


def tokenizer_config(folder: Path) -> Target:
    path = write_byte_tokenizer(folder) / "tokenizer_config.json"
    (folder / "chat_template.jinja").unlink()
    seed = json.loads(path.read_text()) | {
        "chat_template": [{"name": "default", "template": "{{ messages[0].content }}"}],
        "extra_special_tokens": {"image_token": {"content": "<|im_start|>"}},
    }

    limits = Limits(len(TEXT) * 100, 0.5, 32 << 20)

    def read() -> None:
        found = Tokenizer(folder)
        assert isinstance(found.eos_ids, frozenset)
        render(found.templates, MESSAGES, variables=found.special_tokens, limits=limits)

    return Target(mutations.json_text, [json.dumps(seed).encode()], path.write_bytes, read, limits)


def generation_config(folder: Path) -> Target:
    path = folder / "generation_config.json"
    seeds = [
        (mlx_ttd.demo_path() / path.name).read_bytes(),
        json.dumps(
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2]}
        ).encode(),
    ]
    return Target(mutations.json_text, seeds, path.write_bytes, lambda: read_generation_defaults(folder))


def chat_template(folder: Path) -> Target:
    path = folder / "chat_template.jinja"
    seeds = [TEMPLATE.read_bytes(), (mlx_ttd.demo_path() / path.name).read_bytes()]
    limits = Limits(100_000, 0.5, 32 << 20)
    return Target(
        mutations.template,
        seeds,
        path.write_bytes,
        lambda: render(read_templates(folder, {}), MESSAGES, tools=TOOLS, limits=limits),
        limits,
    )


def saved_state(folder: Path) -> Target:
    path, spec = folder / "state.safetensors", model_spec(json.loads((mlx_ttd.demo_path() / "config.json").read_text()))
    fingerprint = {"store": "x"}

    def fresh() -> list[state.LayerState]:
        return state.new_state(spec, 16, mx.float32, 32)

    empty = fresh()
    for layer in empty:
        layer.offset = 3
    state.save(path, empty, [1, 2, 3], fingerprint)
    seeds = [path.read_bytes()]
    # As older versions wrote it: without a digest, so that what is read is looked at itself.
    tensors = {name: array[:, : shape[1]] for name, (array, shape) in arrays_of(empty, 3).items()}
    older = tensors | {"tokens": mx.array([1, 2, 3], mx.int32)}
    mx.save_safetensors(str(path), older, {"fingerprint": json.dumps(fingerprint)})
    seeds.append(path.read_bytes())

    def read() -> None:
        found = fresh()
        with state.saved_state(path, found, fingerprint, spec.vocab) as saved:
            saved.fill(found)
        assert all(0 <= token < spec.vocab for token in saved.tokens)
        assert all(layer.offset == len(saved.tokens) for layer in found)
        assert all(mx.isfinite(array).all() for layer in found for array in layer.arrays)

    return Target(mutations.saved_state, seeds, path.write_bytes, read)


def small_trace() -> Trace:
    ids = np.array([[0, 1], [1, 2]], np.int32)
    rows = np.arange(8, dtype=np.float32).reshape(2, 4)
    arrays = {"embedding": rows, "0.router.ids": ids, "0.hidden": rows + 1, "1.hidden": rows + 2, "logits": rows}
    return Trace("mlx_ttd", "0" * 64, (5, 6), 2, arrays)


def compare(folder: Path) -> None:
    found, own = load_trace(folder), small_trace()
    for left, right in ((found, own), (own, found), (found, found)):
        for atol in (0.0, 0.5):
            if incomparable(left, right) is None:
                str(first_difference(left, right, atol))


def trace_header(folder: Path) -> Target:
    small_trace().save(folder)
    path = folder / "trace.json"
    return Target(mutations.json_text, [path.read_bytes()], path.write_bytes, lambda: compare(folder))


def trace_arrays(folder: Path) -> Target:
    small_trace().save(folder)
    path, header = folder / "trace.safetensors", json.loads((folder / "trace.json").read_text())

    def place(data: bytes) -> None:
        """With a digest that matches wherever the arrays can be read, so that the reader goes on."""
        path.write_bytes(data)
        with suppress(Exception):
            digest = Trace("", "", (), 0, load_file(path)).digest
            (folder / "trace.json").write_text(json.dumps(header | {"digest": digest}))

    return Target(mutations.safetensors, [path.read_bytes()], place, lambda: compare(folder))


def hub(folder: Path) -> Target:
    """A hub that answers an opening and the fetching of a shard."""
    header = make_header(folder, {"a": ("F32", (4,)), "b": ("BF16", (2, 3))})
    shard = header.raw + bytes(header.file_bytes - len(header.raw))
    cache, given = folder / "cache", [b""]
    patience = Patience(tries=2, pause=lambda seconds: None)

    def place(data: bytes) -> None:
        shutil.rmtree(cache, ignore_errors=True)
        given[:] = data.split(mutations.BETWEEN)

    def read() -> None:
        with (
            answering(list(given)),
            open_hub_checkpoint("some-lab/tiny", None, cache, lambda count: None, patience) as checkpoint,
        ):
            for info in checkpoint.tensors.values():
                checkpoint.read(info, 0, info.nbytes)

    seeds = honest_answers(json.dumps(MOE).encode(), shard)
    return Target(mutations.answers, [mutations.BETWEEN.join(seed) for seed in seeds], place, read, writes=cache)


TARGETS: dict[str, Callable[[Path], Target]] = {
    make.__name__: make
    for make in (
        *(manifest, store_config, store_header, store_places),
        *(checkpoint_config, checkpoint_header, checkpoint_index, checkpoint_places),
        *(tokenizer_file, tokenizer_config, generation_config, chat_template, saved_state, trace_header, trace_arrays),
        hub,
    )
}
