"""A model in memory, ready to stream text."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, SupportsIndex

from mlx.utils import tree_flatten

from . import kernels, state
from ._version import __version__
from .allocation import divide_budget, residual_dtype, total_bytes
from .assembly import assemble, enter_division
from .backends import force_backend, require_matmul
from .errors import ContextError, LeaseError, OptionError, StateError
from .generation import (
    Chunk,
    GenerationOptions,
    Record,
    Response,
    Running,
    Turns,
    generate_tokens,
    generation_options,
    peak_bytes,
)
from .observe import Counters
from .options import Options
from .outputs import ends_of, output_stream
from .progress_line import ProgressLine
from .prompts import Prompt, check_ids, continued, ids_after, ids_of, is_chat, repeated
from .stats import Stats, html_table
from .store import Store
from .store_paths import store_name
from .streaming import ExpertProvider, Governor, Ledger, machine_reading, show_size, wire
from .text import Tokenizer
from .warm_up import warm_up


class LLM:
    """A loaded model. Use `load` to make one; it is also a context manager that closes itself."""

    def __init__(self, store: Store, options: Options, beside: LLM | None = None):
        started = kernels.working_clock()
        force_backend(options.backend)
        require_matmul(options.matmul)
        self.store, self.options, self.name = store, options, store_name(store.path)
        self.context = min(options.context, store.spec.max_context)
        self.ledger: Ledger = Ledger(0 if beside else total_bytes(options.memory), beside.ledger if beside else None)
        self.division = divide_budget(store, options, self.context, self.ledger.free)
        enter_division(self.ledger, self.division)
        self.counters = Counters()
        threads = beside.provider.pool.threads if beside is not None and beside.provider is not None else None
        line = ProgressLine(f"loading {self.name}", options.progress)
        parts = assemble(store, options, self.division, self.context, self.ledger, self.counters, threads, line)
        self.model, self.embedding = parts.model, parts.embedding
        self.provider: ExpertProvider | None = parts.provider
        self.governor = Governor(partial(machine_reading, store.path), parts.provider, self.counters)
        if self.provider is not None:
            self.provider.before_call = self.governor.check
        self._unwire = self._wire()
        self.fingerprint = {
            "store": store.digest,
            "dtype": str(residual_dtype(options)),
            "kv_bits": str(options.kv_bits),
            "matmul": options.matmul,
            "version": __version__,
        }
        self._running: Running | None = None
        self._tokenizer: Tokenizer | None = None
        # What the store has is known from here on, though its directory may be removed.
        self.has_tokenizer = (store.path / "tokenizer.json").exists()
        self._end_ids: frozenset[int] | None = None
        self._turns = Turns()
        self._first_token_seconds: float | None = None
        self.last_response: Response | None = None
        if options.warm_up:
            warm_up(self.model, self.provider, self.counters, ProgressLine("making kernels ready", options.progress))
        self.load_seconds = kernels.working_clock() - started

    def _wire(self) -> Callable[[], None]:
        if not self.options.wire:
            return lambda: None
        weights: Any = tree_flatten(self.model.parameters())
        return wire((weight for _, weight in weights), self.provider)

    @property
    def tokenizer(self) -> Tokenizer:
        """The store's tokenizer, loaded when first asked for."""
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(self.store.path)
        return self._tokenizer

    @property
    def closed(self) -> bool:
        return self._turns.closed

    def encode(self, prompt: Prompt, tools: Any = None, **template: Any) -> list[int]:
        """Token ids of a prompt: text as it is, chat messages through the template, or ids, which are only checked."""
        return check_ids(ids_of(self.tokenizer, prompt, tools, template), self.store.spec.vocab)

    def _encode_on(self, prompt: Prompt, options: GenerationOptions) -> tuple[list[int], int]:
        """As `encode`, with the live tokens kept where a chat goes on from them, and how many to mark, 0 for none."""
        if not is_chat(prompt):
            return self.encode(prompt), 0
        template = {**options.template, "tools": options.tools}
        rendered = self.tokenizer.render_chat(prompt, **template)
        live = self._running or Running(self.model, [])
        written = live.tokens if live.sampled is None else [*live.tokens, live.sampled]
        found = continued(self.tokenizer, rendered, written, self._ends(), live.marked)
        ids = check_ids(found, self.store.spec.vocab)
        return ids, repeated(self.tokenizer, prompt, rendered, ids, template) if self.division.mark else 0

    def _ends(self) -> frozenset[int]:
        if self._end_ids is None:
            self._end_ids = ends_of(self.store.path, self.tokenizer if self.has_tokenizer else None)
        return self._end_ids

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[Chunk]:
        """Generate piece by piece. `options` are those of `GenerationOptions`.

        prompt: text, chat messages ({"role", "content"}) or token ids. A prompt that extends the tokens of the last
        generation continues from its state; so do messages that hold its answer as it was, reasoning included. Where
        the chat template drops old reasoning, the answer is read again. Other threads wait for their turn.
        """
        return self._turns.run(self._stream(prompt, generation_options(options), Record()))

    def generate(self, prompt: Prompt, **options: Any) -> Response:
        """Generate to the end. As `stream`. What there was before an interrupt is then in `last_response`."""
        record = Record()
        try:
            for _ in self._turns.run(self._stream(prompt, generation_options(options), record)):
                pass
        finally:
            self.last_response = record.response() if record.chunks else None
        assert self.last_response is not None
        return self.last_response

    def score(self, prompt: Prompt, continuation: str | Sequence[int], **options: Any) -> Response:
        """Teacher forcing: `response.logprobs` are the natural log p of each token of `continuation` after `prompt`.

        Every token runs as a decode step, so the logits are those of generating the same tokens. A text that follows
        a text is cut into tokens together with it.
        """
        if own := sorted({"force", "logprobs"} & set(options)):
            raise OptionError(f"score sets {own[0]} by itself; leave it out, or use generate.")
        ids = ids_after(self.tokenizer, prompt, continuation) if isinstance(continuation, str) else continuation
        if not len(ids):
            raise OptionError("the continuation is empty; give at least one token to score.")
        return self.generate(prompt, force=check_ids(ids, self.store.spec.vocab), logprobs=True, **options)

    def _stream(self, prompt: Prompt, options: GenerationOptions, record: Record) -> Generator[Chunk, None, None]:
        began = kernels.working_clock()
        ids, mark = self._encode_on(prompt, options)
        if options.force:
            check_ids(options.force, self.store.spec.vocab)
        self._require_context(len(ids) + max(0, len(options.force) - 1), len(ids) + options.length)
        sampler, processors = options.sampler(), options.all_processors(len(ids))
        text = output_stream(self.tokenizer if self.has_tokenizer else None, self._ends(), prompt, ids, options)
        self.governor.begin()
        running = self._continue_or_start(ids)
        fresh = ids[len(running.tokens) :]
        # The prompt's end by default, so that a step cut short costs no more than the answer.
        mark = mark or len(ids)
        if self.division.mark and mark > len(running.tokens):
            running.mark(mark)
        record.begin(len(ids), len(running.tokens))
        limit = min(options.length, self.context - len(ids) + 1)
        line = ProgressLine("reading the prompt", self.options.progress)
        steps = generate_tokens(
            running,
            fresh,
            limit,
            sampler,
            processors,
            self.division.chunk,
            self.counters,
            options.on_prefill or line.bar(),
        )
        try:
            for count, step in enumerate(steps, 1):
                chunk = text.add(step, last=count == limit)
                record.add(step, chunk)
                if count == 1:
                    line.clear()
                    self._first_token_seconds = kernels.working_clock() - began
                yield chunk
                if chunk.finish_reason is not None:
                    break
                self.governor.check()
        except GeneratorExit:
            raise
        except BaseException:
            if not running.recover():
                self._running = None
            line.clear()
            raise

    def _require_context(self, needed: int, advised: int) -> None:
        most = self.store.spec.max_context
        if needed > self.context:
            advice = f"shorten it or load with context={min(advised, most)}" if needed <= most else "shorten it"
            limit = (
                f"memory is reserved for {self.context:,}" if needed <= most else f"the model takes at most {most:,}"
            )
            raise ContextError(f"the prompt has {needed:,} tokens and {limit}; {advice}.")

    def _continue_or_start(self, ids: Sequence[int]) -> Running:
        """The live sequence, maybe back at its mark, if `ids` extends it by at least one token, else a new one."""
        running = self._running
        if running is None or not running.resume(ids):
            self._running = None
            running = self._running = Running(self.model, self.model.make_cache())
        return running

    def stats(self, reset: bool = False) -> Stats:
        """Counters and configuration; reset=True starts the counters anew afterwards.

        While another thread is in the middle of a step, that step and those just before it may not be counted yet.
        """
        if self.provider is not None:
            self._turns.between_steps(self.provider.settle)
        stats = Stats(
            self.counters.copy(),
            self.options,
            self.division if self.provider is None else replace(self.division, slots=self.provider.slots),
            dict(kernels.used),
            self.load_seconds,
            self._first_token_seconds,
            kernels.compile_seconds(),
            peak_bytes(),
        )
        if reset:
            for name, value in vars(Counters()).items():
                setattr(self.counters, name, value)
        return stats

    def save_state(self, path: str | os.PathLike[str]) -> None:
        """Write the live sequence (tokens, keys and values, recurrent states) to a safetensors file.

        Another thread that generates goes on after its step.
        """
        self._turns.check()
        with self._turns.stepping:
            if self._running is None:
                raise StateError("there is no sequence to save; generate something first.")
            taken = state.take(self._running.state, self._running.tokens, self.fingerprint)
        state.save(taken, Path(path))

    def restore_state(self, path: str | os.PathLike[str]) -> list[int]:
        """Make a saved sequence the live one and return its tokens; a prompt that extends them continues from it."""
        snapshot = state.load(Path(path))
        self._turns.alone(lambda: self._restore(snapshot))
        return list(snapshot.tokens)

    def _restore(self, snapshot: state.Snapshot) -> None:
        self._running = None
        running = Running(self.model, self.model.make_cache(), list(snapshot.tokens))
        state.put_back(snapshot, running.state, self.fingerprint)
        self._running = running

    def set_memory(self, memory: str | int) -> None:
        """Change the budget without loading anew: banks are resized and start empty. BudgetError names the least.

        A budget shared with other models is changed for all; this model takes what the others leave.
        """
        self._turns.alone(lambda: self._set_memory(memory))

    def _set_memory(self, memory: str | int) -> None:
        total = total_bytes(memory, self.ledger.used)
        options = replace(self.options, memory=memory)
        if self.provider is not None and self.provider.lent:
            raise LeaseError("the memory of a model cannot be changed while a lease on it is open; release it first.")
        others = self.ledger.used - self.ledger.own
        division = divide_budget(self.store, options, self.context, max(0, total - others))
        self.ledger.total = max(self.ledger.total, total)
        if self._running is not None and not division.mark:
            self._running.mark(0)
        self._unwire()
        # Every account is closed before the first is opened anew: scratch may grow where slots shrink.
        for account in ("scratch", "mark"):
            self.ledger.leave(account)
        if self.provider is not None:
            self.provider.resize(division.slots)
        self.ledger.enter("scratch", division.scratch)
        self.ledger.enter("mark", division.mark)
        self._unwire = self._wire()
        self.ledger.total = total
        self.options, self.division = options, division

    def clear_experts(self) -> None:
        """Empty every slot, so that what runs next starts as cold as after loading; the live sequence stays."""
        if self.provider is not None:
            self._turns.alone(self.provider.clear)

    def close(self) -> None:
        """Give all memory and files back. The model cannot be used afterwards; closing twice does nothing.

        A generation that was left unfinished ends; BusyError while another thread is in the middle of a step.
        """
        if self._turns.closed:
            return
        self._turns.close()
        self._running = None
        self._unwire()
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

    def __reduce_ex__(self, protocol: SupportsIndex) -> str:
        raise TypeError("an LLM holds memory and files and is neither copied nor pickled; load the store once more.")

    def __repr__(self) -> str:
        if self.closed:
            return f"<LLM {self.name}, closed>"
        return f"<LLM {self.name}: {', '.join(self._rows().values())}>"

    def _repr_html_(self) -> str:
        return html_table({"store": self.name} | ({"state": "closed"} if self.closed else self._rows()))

    def _rows(self) -> dict[str, str]:
        spec = self.store.spec
        found = {"model": spec.model_type, "budget": f"{show_size(self.ledger.total)} budget"}
        if self.provider is not None:
            found["experts"] = f"{self.provider.slots} of {spec.experts} experts a layer in memory"
        return found | {"context": f"{self.context:,} tokens of context"}
