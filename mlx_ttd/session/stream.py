"""A generation as whoever asks for it sees it: an iterator of pieces, for threads and for event loops."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import BusyError
from ..generation import Chunk, GenerationOptions, Record
from ..progress_line import ProgressLine
from .engine import Ask, Cancel, Failed, Finished, Refused, Request, consultation
from .pieces import Consult, Piece, PromptRead

if TYPE_CHECKING:
    from .llm import LLM

# What goes back where only the time matters at which it does.
ANSWERED = object()


class Pieces:
    """One generation of `llm`, from the outside. Closing or dropping it cancels what runs for it."""

    def __init__(self, llm: LLM, request: Request, options: GenerationOptions, progress: bool):
        self._llm, self._engine, self._request, self._options = llm, llm.engine, request, options
        self._line = ProgressLine("reading the prompt", progress)
        self.record = Record()
        self._sent: Any = None
        self._done = False
        # By C code alone, so that no interrupt can come between a stream's end and its telling.
        request.dropped = weakref.ref(self, self._engine.inbox.put)

    def _require_turn(self) -> None:
        self._engine.require_outside()
        try:
            self._engine.require_open()
        except BusyError:
            self._done = True
            raise

    def _begin(self, notebook: bool) -> tuple[Request, Any]:
        request, sent = self._request, self._sent
        request.thread = threading.get_ident()
        request.notebook = notebook
        self._sent = None
        return request, sent

    def _taken(self, event: Any) -> Chunk | None:
        """The chunk that an event is; None where more has to be asked for. StopIteration at the end."""
        if isinstance(event, Piece):
            self._line.clear()
            self.record.add(event.step, event.chunk, event.prompt_tokens, event.cached_tokens)
            return event.chunk
        if isinstance(event, PromptRead):
            self._tell(event)
            self._sent = ANSWERED
        elif isinstance(event, Consult):
            self._sent = self._processed(event)
        elif isinstance(event, Failed):
            raise event.error
        else:
            assert isinstance(event, Finished)
            raise StopIteration
        return None

    @consultation
    def _tell(self, event: PromptRead) -> None:
        (self._options.on_prefill or self._line.bar())(event.done, event.total)

    @consultation
    def _processed(self, event: Consult) -> Any:
        return self._options.processed(event.tokens, event.logits)

    def _cancel(self) -> None:
        self._done = True
        self._engine.inbox.put(Cancel(self._request))
        self._line.clear()

    def __reduce_ex__(self, protocol: Any) -> str:
        raise TypeError("a generation is neither copied nor pickled; begin another one.")


class Stream(Pieces, Iterator[Chunk]):
    """Chunks of a generation; any thread may ask for the next, and `close` it."""

    def __next__(self) -> Chunk:
        if self._done:
            raise StopIteration
        self._require_turn()
        main = threading.current_thread() is threading.main_thread()
        try:
            while not isinstance(event := self._engine.ask(*self._begin(main)), Refused):
                chunk = self._taken(event)
                if chunk is not None:
                    return chunk
        except BaseException:
            self._cancel()
            raise
        raise event.error

    def close(self) -> None:
        """End the generation; closing twice does nothing."""
        if not self._done:
            self._cancel()


class AsyncStream(Pieces, AsyncIterator[Chunk]):
    """Chunks of a generation for an event loop. No thread waits for them; a task that is cancelled ends it."""

    async def __anext__(self) -> Chunk:
        if self._done:
            raise StopAsyncIteration
        self._require_turn()
        try:
            while not isinstance(event := await self._ask(), Refused):
                chunk = self._taken(event)
                if chunk is not None:
                    return chunk
        except StopIteration:
            self._cancel()
            raise StopAsyncIteration from None
        except BaseException:
            self._cancel()
            raise
        raise event.error

    async def _ask(self) -> Any:
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[Any] = loop.create_future()
        request, sent = self._begin(False)
        self._engine.inbox.put(Ask(request, sent, partial(_deliver, loop, reply)))
        if self._engine.finished:
            # It may have ended before it saw this.
            loop.call_later(1.0, _settle, reply, Failed(BusyError(self._engine.reason)))
        return await reply

    async def aclose(self) -> None:
        """End the generation; closing twice does nothing."""
        if not self._done:
            self._cancel()


def _deliver(loop: asyncio.AbstractEventLoop, reply: asyncio.Future[Any], event: Any) -> None:
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(_settle, reply, event)


def _settle(reply: asyncio.Future[Any], event: Any) -> None:
    if not reply.done():
        reply.set_result(event)
