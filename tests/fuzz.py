"""Hostile input by the thousand: every reader of untrusted files either works or raises a TTDError, soon and in bounds.

    python tests/fuzz.py --target manifest --count 20000 [--start 0]

Input number i of a target is the same in every run; one that breaks a reader is written to the working directory.
"""

from __future__ import annotations

import argparse
import encodings.unicode_escape  # noqa: F401  imported with the first escape in a template
import json
import random
import resource
import shutil
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2.debug  # noqa: F401  imported by Jinja with the first error
import mlx.core as mx
import mutations
import numpy as np
import tokenizers
from checkpoints import tiny
from safetensors.numpy import load_file
from tokenizers import decoders, models, normalizers, pre_tokenizers
from vocabulary import TEMPLATE, write_byte_tokenizer

import mlx_ttd
from mlx_ttd import state
from mlx_ttd.errors import TTDError
from mlx_ttd.generation import read_generation_defaults
from mlx_ttd.observe import Trace, first_difference, incomparable, load_trace
from mlx_ttd.spec import model_spec
from mlx_ttd.store import open_store
from mlx_ttd.store.checkpoint import INDEX, open_checkpoint
from mlx_ttd.store.sources import match
from mlx_ttd.text import Limits, Tokenizer, read_templates, render

SECONDS, TIMES, OWN_BYTES, MESSAGE_CHARACTERS = 1.0, 10, 4 << 20, 4000
TEXT = "In the beginning, God's 42 works: <|im_start|> é \U0001f30d"
MESSAGES = [
    {"role": "user", "content": "Genesis 1:1"},
    {"role": "assistant", "content": "<think>\n\n</think>\n\nIn the beginning"},
    {"role": "user", "content": "And then?"},
]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
FORBIDDEN = ("pickle.", "marshal.", "exec", "compile", "import", "os.", "subprocess.", "socket.", "ctypes.", "shutil.")
ALLOWED = ("os.listdir", "os.scandir", "os.walk", "os.fwalk")


@dataclass(frozen=True)
class Target:
    """A reader and where its untrusted file lies. `place` writes an input; `compiles`: it may compile Python code."""

    make: mutations.Make
    seeds: Sequence[bytes]
    place: Callable[[bytes], Any]
    read: Callable[[], Any]
    compiles: bool = False


def manifest(folder: Path) -> Target:
    path = shutil.copytree(mlx_ttd.demo_path(), folder / "store") / "manifest.json"
    return Target(mutations.json_text, [path.read_bytes()], path.write_bytes, lambda: open_store(path.parent))


def store_header(folder: Path) -> Target:
    path = shutil.copytree(mlx_ttd.demo_path(), folder / "store") / "mtp.safetensors"
    return Target(mutations.safetensors, [path.read_bytes()], path.write_bytes, lambda: open_store(path.parent))


def store_config(folder: Path) -> Target:
    path = shutil.copytree(mlx_ttd.demo_path(), folder / "store") / "config.json"
    return Target(mutations.json_text, [path.read_bytes()], path.write_bytes, lambda: open_store(path.parent))


def checkpoint_files(folder: Path, name: str, make: mutations.Make) -> Target:
    path = tiny(folder / "checkpoint") / name
    index = {"weight_map": {"a": "model.safetensors", "b": "model.safetensors"}}
    if name == INDEX:
        path.write_text(json.dumps(index))
    return Target(make, [path.read_bytes()], path.write_bytes, lambda: match(open_checkpoint(path.parent)))


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

    def read() -> None:
        found = Tokenizer(folder)
        assert isinstance(found.eos_ids, frozenset)
        render(found.templates, MESSAGES, variables=found.special_tokens, limits=Limits(len(TEXT) * 100, 0.1))

    return Target(mutations.json_text, [json.dumps(seed).encode()], path.write_bytes, read, compiles=True)


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
    limits = Limits(100_000, 0.02)
    return Target(
        mutations.template,
        seeds,
        path.write_bytes,
        lambda: render(read_templates(folder, {}), MESSAGES, tools=TOOLS, limits=limits),
        compiles=True,
    )


def saved_state(folder: Path) -> Target:
    path, spec = folder / "state.safetensors", model_spec(json.loads((mlx_ttd.demo_path() / "config.json").read_text()))

    def fresh() -> list[state.LayerState]:
        return state.new_state(spec, 16, mx.float32, mx.float32)

    empty = fresh()
    for layer in empty:
        layer.restore([a[:, :3] if isinstance(layer, state.KVState) else a for a in layer.state], 3)
    state.save(state.take(empty, [1, 2, 3], {"store": "x"}), path)

    def read() -> None:
        state.put_back(state.load(path), fresh(), {"store": "x"})

    return Target(mutations.safetensors, [path.read_bytes()], path.write_bytes, read)


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


TARGETS: dict[str, Callable[[Path], Target]] = {
    make.__name__: make
    for make in (
        *(manifest, store_config, store_header, checkpoint_config, checkpoint_header, checkpoint_index),
        *(tokenizer_file, tokenizer_config, generation_config, chat_template, saved_state, trace_header, trace_arrays),
    )
}
watched: list[str] | None = None


def audit(event: str, arguments: tuple[Any, ...]) -> None:
    if watched is None:
        return
    if event == "open":
        mode, flags = arguments[1:]
        if (isinstance(mode, str) and set(mode) & set("wax+")) or (isinstance(flags, int) and flags & 3):
            watched.append(f"{event} {arguments!r}")
    elif event.startswith(FORBIDDEN) and event not in ALLOWED:
        watched.append(f"{event} {arguments!r}"[:300])


sys.addaudithook(audit)


@contextmanager
def watching() -> Iterator[list[str]]:
    """The forbidden events that Python's audit hooks report meanwhile."""
    global watched
    watched = found = []
    try:
        yield found
    finally:
        watched = None


def warm(target: Target) -> None:
    """Read an intact and a broken file, so that what is imported or kept once is not charged to an input."""
    for data in (*target.seeds, b"{", b"{{ 1 / 0 }}", *target.seeds):
        target.place(data)
        with suppress(TTDError):
            target.read()


def check(target: Target, data: bytes) -> bool:
    """Whether the reader takes `data`. AssertionError, or any other exception but a TTDError, is a finding."""
    target.place(data)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    arrays = mx.get_active_memory()
    mx.reset_peak_memory()
    tracemalloc.start()
    started, message = time.process_time(), None
    try:
        with watching() as events:
            target.read()
    except TTDError as error:
        message = str(error)
    finally:
        seconds = time.process_time() - started
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    if target.compiles:
        events = [event for event in events if not event.startswith(("compile", "exec"))]
    limit = TIMES * len(data) + OWN_BYTES
    resident = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident) * 1024
    assert message is None or 20 < len(message) < MESSAGE_CHARACTERS, f"a message of {len(message):,} characters"
    assert not events, f"it did what no reader does: {events[:3]}"
    assert seconds < SECONDS, f"{seconds:.1f} s for {len(data):,} bytes"
    assert peak < limit, f"{peak:,} bytes of Python objects for {len(data):,} bytes"
    assert mx.get_peak_memory() - arrays < limit, f"{mx.get_peak_memory() - arrays:,} bytes of arrays"
    assert resident < limit + (32 << 20), f"memory grew by {resident:,} bytes for {len(data):,}"
    return message is None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=TARGETS, required=True)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--findings", type=int, default=5, help="how many to report before stopping")
    options = parser.parse_args()
    done, taken, findings, started = 0, 0, 0, time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        target = TARGETS[options.target](Path(scratch))
        warm(target)
        for number in range(options.start, options.start + options.count):
            try:
                data = target.make(random.Random(f"{options.target} {number}"), target.seeds)
                taken += check(target, data)
            except KeyboardInterrupt:
                break
            except BaseException as error:
                findings += 1
                saved = Path(f"{options.target}-{number}.input")
                saved.write_bytes(data)
                print(f"{saved}: {type(error).__name__}: {str(error)[:300]}", flush=True)
                if findings == options.findings:
                    break
            done += 1
    seconds = time.monotonic() - started
    print(f"{options.target}: {done:,} inputs in {seconds:.0f} s, {taken:,} taken, {findings} findings", flush=True)
    sys.exit(findings > 0)


if __name__ == "__main__":
    main()
