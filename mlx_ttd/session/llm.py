"""A model in memory, ready to stream text."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, SupportsIndex

from .. import kernels
from ..allocation import total_bytes
from ..errors import OptionError
from ..generation import GenerationOptions, Response, generation_options, peak_bytes
from ..observe import Counters
from ..options import Options
from ..outputs import ends_of
from ..progress_line import ProgressLine
from ..prompts import PreparedPrompt, Prompt, check_ids, ids_after, ids_of, is_chat, prepare
from ..stats import Stats, html_table
from ..store import Store
from ..store_paths import store_name
from ..streaming import Division, ExpertProvider, Ledger, show_size
from ..text import Tokenizer
from ..warm_up import warm_up
from .core import Core
from .engine import Close, Engine, Request
from .protocol import ProtocolModel
from .stream import AsyncStream, Stream


class LLM:
    """A loaded model. Use `load` to make one; it is also a context manager that closes itself."""

    def __init__(self, store: Store, options: Options, beside: LLM | None = None):
        started = kernels.working_clock()
        self.store, self.name = store, store_name(store.path)
        # What the store has is known from here on, though its directory may be removed.
        self.has_tokenizer = (store.path / "tokenizer.json").exists()
        self.ledger: Ledger = Ledger(0 if beside else total_bytes(options.memory), beside.ledger if beside else None)
        threads = beside.provider.pool.threads if beside is not None and beside.provider is not None else None
        self.engine = Engine(options.idle)
        self.engine.owner = weakref.ref(self, self.engine.inbox.put)
        try:
            line = ProgressLine(f"loading {self.name}", options.progress)
            self._core: Core = self.engine.call(
                partial(Core, self.engine, store, options, self.ledger, threads), line.bar(show_size)
            )
            line.clear()
            self.model = ProtocolModel(self.engine, self._core)
            self._tokenizer: Tokenizer | None = None
            self._ends: frozenset[int] | None = None
            self.last_response: Response | None = None
            if options.warm_up:
                self._warm_up()
        except BaseException:
            self.engine.inbox.put(Close(None))
            raise
        self.load_seconds = kernels.working_clock() - started

    def _warm_up(self) -> None:
        core, line = self._core, ProgressLine("making kernels ready", self.options.progress)
        self.engine.call(lambda show: warm_up(core.model, core.provider, core.counters, show), line.show)
        line.clear()

    @property
    def options(self) -> Options:
        """The options in effect."""
        return self._core.options

    @property
    def context(self) -> int:
        """Tokens that a sequence can have."""
        return self._core.context

    @property
    def division(self) -> Division:
        """How the memory budget is divided."""
        return self._core.division

    @property
    def counters(self) -> Counters:
        return self._core.counters

    @property
    def provider(self) -> ExpertProvider | None:
        """Of the experts; None for a dense model."""
        return self._core.provider

    @property
    def tokenizer(self) -> Tokenizer:
        """The store's tokenizer, loaded when first asked for."""
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(self.store.path)
        return self._tokenizer

    @property
    def closed(self) -> bool:
        return self.engine.ending

    def encode(self, prompt: Prompt, tools: Any = None, **template: Any) -> list[int]:
        """Token ids of a prompt: text as it is, chat messages through the template, or ids, which are only checked.

        ContextError for a text that no context of the model can hold.
        """
        return self._encode(prompt, tools, template, self.store.spec.max_context)

    def _encode(self, prompt: Prompt, tools: Any, template: dict[str, Any], context: int) -> list[int]:
        admit = partial(self._admit, context)
        return check_ids(ids_of(self.tokenizer, prompt, tools, template, admit), self.store.spec.vocab)

    def _admit(self, context: int, text: str) -> None:
        """ContextError for a text that is sure to have more than `context` tokens, before it is cut into them."""
        fewest = self.tokenizer.fewest_tokens(text)
        if fewest > context:
            self._core.require_context(fewest, fewest, "at least ")

    def _prepared(self, prompt: Prompt, options: GenerationOptions) -> PreparedPrompt:
        tokenizer = self.tokenizer if self.has_tokenizer else None
        if not is_chat(prompt):
            ids = self._encode(prompt, None, {}, self.context)
            return PreparedPrompt(tokenizer, self._end_ids(), ids)
        template = {**options.template, "tools": options.tools}
        admit = partial(self._admit, self.context)
        return prepare(self.tokenizer, self._end_ids(), prompt, template, bool(self.division.mark), admit)

    def _end_ids(self) -> frozenset[int]:
        """The ids that end a text, read once."""
        if self._ends is None:
            self._ends = ends_of(self.store.path, self.tokenizer if self.has_tokenizer else None)
        return self._ends

    def _request(self, prompt: Prompt, options: GenerationOptions) -> Request:
        self.engine.require_open()
        self._core.settle_here()
        prepared, core = self._prepared(prompt, options), self._core
        return Request(lambda: core.generation(prepared, options), "another generation", wait=options.wait)

    def stream(self, prompt: Prompt, **options: Any) -> Stream:
        """Generate piece by piece. `options` are those of `GenerationOptions`.

        prompt: text, chat messages ({"role", "content"}) or token ids. A prompt that extends the tokens of the last
        generation continues from its state; so do messages that hold its answer as it was, reasoning included. Where
        the chat template drops old reasoning, the answer is read again. A piece is computed when it is asked for, by
        any thread; generations take turns in the order in which their first pieces are asked for. The main thread ends
        one that it left unfinished by beginning another. A stream that another call ended raises BusyError.
        """
        chosen = generation_options(options)
        return Stream(self, self._request(prompt, chosen), chosen, self.options.progress)

    def astream(self, prompt: Prompt, **options: Any) -> AsyncStream:
        """As `stream`, for `async for`: no thread waits for a piece, and a task that is cancelled ends it."""
        chosen = generation_options(options)
        return AsyncStream(self, self._request(prompt, chosen), chosen, progress=False)

    def generate(self, prompt: Prompt, **options: Any) -> Response:
        """Generate to the end. As `stream`. What there was before an interrupt is then in `last_response`."""
        stream = self.stream(prompt, **options)
        try:
            for _ in stream:
                pass
        finally:
            stream.close()
            self.last_response = stream.record.response() if stream.record.chunks else None
        assert self.last_response is not None
        return self.last_response

    def score(self, prompt: Prompt, continuation: str | Sequence[int], **options: Any) -> Response:
        """Teacher forcing: `response.logprobs` are the natural log p of each token of `continuation` after `prompt`.

        Every token runs as a decode step, so the logits are those of generating the same tokens. A text that follows
        a text is cut into tokens together with it, and spaces that end the prompt are scored with it, as in lm-eval's
        loglikelihood: `response.logprobs` add up to that. After chat messages a text is cut into tokens by itself.
        """
        if own := sorted({"force", "logprobs"} & set(options)):
            raise OptionError(f"score sets {own[0]} by itself; leave it out, or use generate.")
        # The last token of a continuation takes no room, since nothing follows it.
        admit = partial(self._admit, self.context + 1)
        prompt, ids = ids_after(self.tokenizer, prompt, continuation, admit)
        if not len(ids):
            raise OptionError("the continuation is empty; give at least one token to score.")
        return self.generate(prompt, force=check_ids(ids, self.store.spec.vocab), logprobs=True, **options)

    def stats(self, reset: bool = False) -> Stats:
        """Counters and configuration; reset=True starts the counters anew afterwards.

        While a step is being computed, that step and those just before it may not be counted yet.
        """
        core = self._core
        self.engine.require_process()
        if not self.engine.busy and not self.closed:
            self.engine.call(core.settle, within_piece=True)
        stats = Stats(
            core.counters.copy(),
            core.options,
            core.division if core.provider is None else replace(core.division, slots=core.provider.slots),
            dict(kernels.used),
            self.load_seconds,
            core.first_token_seconds,
            kernels.compile_seconds(),
            peak_bytes(),
        )
        if reset:
            for name, value in vars(Counters()).items():
                setattr(core.counters, name, value)
        return stats

    def save_state(self, path: str | os.PathLike[str]) -> None:
        """Write the live sequence (tokens, keys and values, recurrent states) to a safetensors file.

        A generation that is under way goes on after it.
        """
        core = self._core
        self.engine.call(lambda: core.save(path))

    def restore_state(self, path: str | os.PathLike[str]) -> list[int]:
        """Make a saved sequence the live one and return its tokens; a prompt that extends them continues from it."""
        core = self._core
        return self.engine.alone(lambda: core.restore(path), "restore_state")

    def set_memory(self, memory: str | int) -> None:
        """Change the budget without loading anew: banks are resized and start empty. BudgetError names the least.

        A budget shared with other models is changed for all; this model takes what the others leave.
        """
        core = self._core
        self.engine.alone(lambda: core.set_memory(memory), "set_memory")

    def clear_experts(self) -> None:
        """Empty every slot, so that what runs next starts as cold as after loading; the live sequence stays."""
        core = self._core
        self.engine.alone(core.clear_experts, "clear_experts")

    def close(self) -> None:
        """Give all memory and files back. The model cannot be used afterwards; closing twice does nothing.

        Whatever runs ends, at the latest after its step, block of a prompt or wave of experts.
        """
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
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
