"""What a model in use consists of: its parts, its budget and its live sequence. Its engine's thread alone runs it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from .. import kernels, state
from .._version import __version__
from ..allocation import divide_budget, residual_dtype, total_bytes
from ..assembly import assemble, enter_division
from ..backends import force_backend, require_matmul
from ..errors import ContextError, LeaseError, StateError
from ..generation import GenerationOptions, Running, Step, decode, prefill
from ..observe import MODEL, Counters, note
from ..options import Options
from ..outputs import output_stream
from ..prompts import PreparedPrompt, check_ids
from ..store import Store
from ..streaming import ExpertProvider, Governor, Ledger, ReadThreads, machine_reading, wire
from .engine import Engine
from .pieces import Consult, Piece, PromptRead


class Core:
    """The parts of a loaded model."""

    def __init__(
        self,
        engine: Engine,
        store: Store,
        options: Options,
        ledger: Ledger,
        threads: ReadThreads | None,
        report: Callable[[int, int], None],
    ):
        self.engine, self.store, self.options, self.ledger = engine, store, options, ledger
        self.model: Any = None
        self.embedding: Any = None
        self.provider: ExpertProvider | None = None
        self.sequence: Running | None = None
        self.first_token_seconds: float | None = None
        self.counters = Counters()
        self._unwire: Callable[[], None] = lambda: None
        engine.on_close = self.close
        force_backend(options.backend)
        require_matmul(options.matmul)
        self.context = min(options.context, store.spec.max_context)
        self.division = divide_budget(store, options, self.context, ledger.free)
        enter_division(ledger, self.division)
        with engine.cancellable():
            parts = assemble(store, options, self.division, self.context, ledger, self.counters, threads, report)
        self.model, self.embedding, self.provider = parts.model, parts.embedding, parts.provider
        self.governor = Governor(partial(machine_reading, store.path), self.provider, self.counters)
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

    def _wire(self) -> Callable[[], None]:
        if not self.options.wire:
            return lambda: None
        weights: Any = tree_flatten(self.model.parameters())
        return wire((weight for _, weight in weights), self.provider)

    def generation(self, prompt: PreparedPrompt, options: GenerationOptions) -> Generator[Any, Any, None]:
        """Continue or replace the live sequence by `prompt` and what the model says to it: a Piece a token.

        A PromptRead after each chunk wants an answer where a caller's function is to be called, and so does a Consult.
        """
        began = kernels.working_clock()
        live = self.sequence or Running(self.model, [])
        written = live.tokens if live.sampled is None else [*live.tokens, live.sampled]
        ids, mark = prompt.ids_after(written, live.marked)
        ids = check_ids(ids, self.store.spec.vocab)
        if options.force:
            check_ids(options.force, self.store.spec.vocab)
        self.require_context(len(ids) + max(0, len(options.force) - 1), len(ids) + options.length)
        sampler, penalties = options.sampler(), options.penalties(len(ids))
        text = output_stream(prompt.tokenizer, prompt.ends, prompt.chat, ids, options)
        self.governor.begin()
        running = self._continue_or_start(ids)
        fresh, cached = ids[len(running.tokens) :], len(running.tokens)
        # The prompt's end by default, so that a step cut short costs no more than the answer, and a prompt that comes
        # again one step.
        mark = mark or len(ids) - 1
        if self.division.mark and mark >= max(1, len(running.tokens)) and mark != running.marked:
            running.mark(mark)
        limit = min(options.length, self.context - len(ids) + 1)
        try:
            running.sampled = None
            for done, total in self._prefill(running, fresh[:-1]):
                yield PromptRead(done, total, options.on_prefill is not None)
            token = fresh[-1]
            for count in range(1, limit + 1):
                started, missed = time.perf_counter(), self.counters.misses
                with self.using():
                    logits = decode(running, token, self.counters)
                seconds, misses = time.perf_counter() - started, self.counters.misses - missed
                for penalty in penalties:
                    logits = penalty(running.tokens, logits)
                if options.processors:
                    mx.eval(logits)
                    logits = yield Consult(list(running.tokens), logits)
                token = running.sampled = int(sampler(logits).item())  # type: ignore[arg-type]
                mx.eval(logits)
                note(MODEL, "token")
                step = Step(token, logits, seconds, misses)
                chunk = text.add(step, last=count == limit)
                if count == 1:
                    self.first_token_seconds = kernels.working_clock() - began
                yield Piece(chunk, step, len(ids), cached)
                note(MODEL, "host")
                if chunk.finish_reason is not None:
                    break
                self.governor.check()
        except GeneratorExit:
            raise
        except BaseException:
            if not running.recover():
                self.sequence = None
            raise

    def _prefill(self, running: Running, tokens: Sequence[int]) -> Generator[tuple[int, int], None, None]:
        chunks = prefill(running, tokens, self.division.chunk, self.counters)
        while True:
            with self.using(), self.engine.cancellable():
                told = next(chunks, None)
            if told is None:
                return
            yield told

    def using(self) -> Any:
        """A block in which the experts are the engine's."""
        return nullcontext() if self.provider is None else self.provider.using()

    def require_context(self, needed: int, advised: int, told: str = "") -> None:
        """ContextError for a prompt of `needed` tokens that has no room. told: what the message says before them."""
        most = self.store.spec.max_context
        if needed > self.context:
            advice = f"shorten it or load with context={min(advised, most)}" if needed <= most else "shorten it"
            limit = (
                f"memory is reserved for {self.context:,}" if needed <= most else f"the model takes at most {most:,}"
            )
            raise ContextError(f"the prompt has {told}{needed:,} tokens and {limit}; {advice}.")

    def _continue_or_start(self, ids: Sequence[int]) -> Running:
        """The live sequence, maybe back at its mark, if `ids` extends it by at least one token, else a new one."""
        running = self.sequence
        if running is None or not running.resume(ids):
            self.sequence = None
            running = self.sequence = Running(self.model, self.model.make_cache())
        return running

    def settle_here(self) -> None:
        """Evaluate what the calling thread left to be evaluated of experts in a model of its own."""
        if self.provider is not None:
            self.provider.settle_here()

    def settle(self) -> None:
        """Count the choices that were not read back so far."""
        if self.provider is not None:
            self.provider.settle()

    def save(self, path: str | os.PathLike[str]) -> None:
        if self.sequence is None:
            raise StateError("there is no sequence to save; generate something first.")
        state.save(Path(path), self.sequence.state, self.sequence.tokens, self.fingerprint)

    def restore(self, path: str | os.PathLike[str]) -> list[int]:
        # Nothing is allocated before it is evaluated, so there are never two states.
        empty = state.new_state(self.store.spec, self.context, self.model.dtype, self.options.kv_bits)
        with state.saved_state(Path(path), empty, self.fingerprint, self.store.spec.vocab) as saved:
            self.sequence = None
            saved.fill(empty)
        self.sequence = Running(self.model, empty, saved.tokens)
        return list(saved.tokens)

    def set_memory(self, memory: str | int) -> None:
        total = total_bytes(memory, self.ledger.used)
        options = replace(self.options, memory=memory)
        if self.provider is not None and self.provider.lent:
            raise LeaseError("the memory of a model cannot be changed while a lease on it is open; release it first.")
        others = self.ledger.used - self.ledger.own
        division = divide_budget(self.store, options, self.context, max(0, total - others))
        self.ledger.total = max(self.ledger.total, total)
        if self.sequence is not None and not division.mark:
            self.sequence.mark(0)
        self._unwire()
        # Every account is closed before the first is opened anew: scratch may grow where slots shrink.
        for account in ("scratch", "mark"):
            self.ledger.leave(account)
        if self.provider is not None:
            self.provider.resize(division.slots)
            self.governor.granted = self.provider.slots
        self.ledger.enter("scratch", division.scratch)
        self.ledger.enter("mark", division.mark)
        self._unwire = self._wire()
        self.ledger.total = total
        self.options, self.division = options, division

    def clear_experts(self) -> None:
        if self.provider is not None:
            self.provider.clear()

    def close(self) -> None:
        """Give all memory and files back."""
        self.sequence = None
        self._unwire()
        if self.provider is not None:
            self.provider.close()
        if self.embedding is not None:
            self.embedding.close()
        self.model = self.embedding = None
        for account in list(self.ledger.accounts):
            self.ledger.leave(account)
