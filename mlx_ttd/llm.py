"""A model in memory, ready to stream text."""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import mlx.core as mx

from . import kernels, state
from ._version import __version__
from .allocation import divide_budget, dtypes
from .errors import ContextError, OptionError, StateError
from .generation import (
    Chunk,
    GenerationOptions,
    IdStream,
    Record,
    Response,
    Running,
    TextStream,
    Turns,
    generate_tokens,
    generation_options,
    peak_bytes,
    read_generation_defaults,
    stop_ids,
)
from .layers import ResidentWeights
from .models import Model, model_class
from .observe import Counters
from .options import Options
from .store import Store
from .streaming import (
    ALLOCATOR_RESERVE,
    Division,
    EmbeddingRows,
    ExpertProvider,
    Ledger,
    ReadPool,
    show_size,
)
from .text import Tokenizer, opens_reasoning

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Stats:
    """What a model did since it was loaded or last reset, what it holds, and with which options and kernels it runs."""

    counters: Counters
    options: Options
    division: Division
    kernels: Mapping[str, str]
    load_seconds: float
    peak_bytes: int

    @property
    def hit_rate(self) -> float | None:
        """Share of expert requests that were in memory; None before the first."""
        return self.counters.hits / self.counters.requests if self.counters.requests else None

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"hit_rate": self.hit_rate}


class LLM:
    """A loaded model. Use `load` to make one; it is also a context manager that closes itself."""

    def __init__(self, store: Store, options: Options):
        started = time.perf_counter()
        kernels.set_backend(None if options.backend == "auto" else options.backend)  # type: ignore[arg-type]
        self.store, self.options = store, options
        self.context = min(options.context, store.spec.max_context)
        self.division = divide_budget(store, options, self.context)
        self.ledger = Ledger(self.division.total)
        self.ledger.enter("allocator", ALLOCATOR_RESERVE)
        self.ledger.enter("resident", self.division.resident)
        self.ledger.enter("state", self.division.state)
        self.ledger.enter("scratch", self.division.scratch)
        self.counters = Counters()
        self.provider = self._provider() if store.spec.is_moe else None
        weights = ResidentWeights(store)
        self.embedding = None
        if store.embedding:
            self.embedding = EmbeddingRows(store.embedding, store.quantisation("embedding"), self.counters)
        dtype, kv_dtype = dtypes(options)
        model = model_class(store.spec.model_type)
        self.model: Model = model(store.spec, weights, self.provider, self.embedding, dtype, kv_dtype, self.context)
        mx.eval(self.model.parameters())
        self.counters.resident_bytes = weights.bytes_read
        self.fingerprint = {
            "store": store.digest,
            "dtype": str(dtype),
            "kv_dtype": str(kv_dtype),
            "version": __version__,
        }
        self._running: Running | None = None
        self._tokenizer: Tokenizer | None = None
        self._turns = Turns()
        self.load_seconds = time.perf_counter() - started

    def _provider(self) -> ExpertProvider:
        options = self.options
        pool = ReadPool(options.depth, options.parts, self.counters)
        return ExpertProvider(
            self.store,
            self.division.slots,
            self.ledger,
            self.counters,
            pool,
            options.policy,
            options.verify,
            options.read_mode,
        )

    @property
    def tokenizer(self) -> Tokenizer:
        """The store's tokenizer, loaded when first asked for."""
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(self.store.path)
        return self._tokenizer

    @property
    def has_tokenizer(self) -> bool:
        return (self.store.path / "tokenizer.json").exists()

    def encode(self, prompt: Prompt, tools: Any = None, **template: Any) -> list[int]:
        """Token ids of a prompt: text as it is, chat messages through the template, or ids, which are only checked."""
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt)
        elif prompt and isinstance(prompt[0], Mapping):
            ids = self.tokenizer.encode_chat(prompt, tools=tools, **template)  # type: ignore[arg-type]
        else:
            ids = [int(token) for token in prompt]  # type: ignore[arg-type]
        if not ids:
            raise OptionError("the prompt is empty; give at least one token.")
        if bad := [token for token in ids if not 0 <= token < self.store.spec.vocab]:
            raise OptionError(f"token {bad[0]} is outside the vocabulary of {self.store.spec.vocab:,}.")
        return ids

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[Chunk]:
        """Generate piece by piece. `options` are those of `GenerationOptions`.

        prompt: text, chat messages ({"role", "content"}) or token ids. A prompt that extends the tokens of the last
        generation continues from its state. Other threads wait for their turn.
        """
        return self._turns.run(self._stream(prompt, generation_options(options), Record()))

    def generate(self, prompt: Prompt, **options: Any) -> Response:
        """Generate to the end. As `stream`."""
        record = Record()
        chunks = list(self._turns.run(self._stream(prompt, generation_options(options), record)))
        return record.response(chunks)

    def _stream(self, prompt: Prompt, options: GenerationOptions, record: Record) -> Generator[Chunk, None, None]:
        ids = self.encode(prompt, options.tools, **options.template)
        if len(ids) > self.context:
            raise ContextError(
                f"the prompt has {len(ids):,} tokens and memory is reserved for {self.context:,}; "
                f"shorten it or load with context={len(ids) + options.max_tokens}."
            )
        running = self._continue_or_start(ids)
        fresh = ids[len(running.tokens) :]
        record.begin(len(ids), len(running.tokens))
        text = self._text_stream(prompt, ids, options)
        limit = min(options.max_tokens, self.context - len(ids) + 1)
        steps = generate_tokens(
            running,
            fresh,
            limit,
            options.sampler(),
            options.all_processors(len(ids)),
            self.division.chunk,
            self.counters,
            options.on_prefill,
        )
        try:
            for count, step in enumerate(steps, 1):
                chunk = text.add(step, last=count == limit)
                record.add(step)
                yield chunk
                if chunk.finish_reason is not None:
                    break
        except GeneratorExit:
            raise
        except BaseException:
            # A step that was cut short leaves layers at different positions: the state cannot be continued.
            self._running = None
            raise

    def _continue_or_start(self, ids: Sequence[int]) -> Running:
        """The live sequence if `ids` extends it by at least one token, else a new one."""
        running = self._running
        if running is None or len(running.tokens) >= len(ids) or list(ids[: len(running.tokens)]) != running.tokens:
            self._running = None
            running = self._running = Running(self.model, self.model.make_cache())
        return running

    def _text_stream(self, prompt: Prompt, ids: Sequence[int], options: GenerationOptions) -> TextStream | IdStream:
        eos = read_generation_defaults(self.store.path).eos_ids
        if not self.has_tokenizer:
            return IdStream(frozenset() if options.ignore_eos else frozenset(eos), options.logprobs)
        tokenizer = self.tokenizer
        stops = frozenset() if options.ignore_eos else stop_ids(tokenizer.token_id, {*eos, *tokenizer.eos_ids})
        chat = not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], Mapping)
        inside = chat and opens_reasoning(tokenizer.decode(ids[-64:]))
        return TextStream(tokenizer, stops, options.stop_strings, inside, options.tools, options.logprobs)

    def stats(self, reset: bool = False) -> Stats:
        """Counters and configuration; reset=True starts the counters anew afterwards."""
        if self.provider is not None:
            self.provider.settle()
        stats = Stats(
            self.counters.copy(), self.options, self.division, dict(kernels.used), self.load_seconds, peak_bytes()
        )
        if reset:
            for name, value in vars(Counters()).items():
                setattr(self.counters, name, value)
        return stats

    def save_state(self, path: str | os.PathLike[str]) -> None:
        """Write the live sequence (tokens, keys and values, recurrent states) to a safetensors file."""
        if self._running is None:
            raise StateError("there is no sequence to save; generate something first.")
        state.save(state.take(self._running.state, self._running.tokens, self.fingerprint), Path(path))

    def restore_state(self, path: str | os.PathLike[str]) -> list[int]:
        """Make a saved sequence the live one and return its tokens; a prompt that extends them continues from it."""
        snapshot = state.load(Path(path))
        self._running = None
        running = Running(self.model, self.model.make_cache(), list(snapshot.tokens))
        state.put_back(snapshot, running.state, self.fingerprint)
        self._running = running
        return list(snapshot.tokens)

    def set_memory(self, memory: str | int) -> None:
        """Change the budget without loading anew: banks are resized and start empty. BudgetError names the least."""
        options = replace(self.options, memory=memory)
        division = divide_budget(self.store, options, self.context)
        self.ledger.total = max(self.ledger.total, division.total)
        self.ledger.leave("scratch")
        self.ledger.enter("scratch", division.scratch)
        if self.provider is not None:
            self.provider.resize(division.slots)
        self.ledger.total = division.total
        self.options, self.division = options, division

    def close(self) -> None:
        """Give all memory and files back. The model cannot be used afterwards; closing twice does nothing."""
        if self._turns.closed:
            return
        self._turns.close()
        self._running = None
        del self.model
        if self.provider is not None:
            self.provider.close()
        if self.embedding is not None:
            self.embedding.close()
        for account in list(self.ledger.accounts):
            self.ledger.leave(account)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        with suppress(Exception):
            self.close()

    def __repr__(self) -> str:
        if self._turns.closed:
            return f"<LLM {self.store.path.name}, closed>"
        spec, division = self.store.spec, self.division
        slots = f", {division.slots} of {spec.experts} experts a layer in memory" if self.provider else ""
        return f"<LLM {self.store.path.name}: {spec.model_type}, {show_size(division.total)} budget{slots}>"
