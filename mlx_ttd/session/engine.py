"""The one thread that runs a model. Everybody else reaches it through its inbox and waits for replies.

An inbox is a SimpleQueue: putting something in takes no lock that an interrupt could leave taken, and is safe within
finalisers. A stream or an LLM that is dropped puts its weak reference there by itself.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, NamedTuple, TypeGuard

import mlx.core as mx

from ..errors import BusyError
from ..kernels import require_unforked
from ..observe import Cancelled, cancel_point, check_at_cancel_points

CLOSED = "this model is closed, by close() or since its LLM was let go; load it again and keep that."
EXIT_SECONDS = 10.0

_open: set[Engine] = set()
# MLX never ends a stream's thread, so streams pass from an engine that ends to the next one.
_streams: list[mx.Stream] = []


class Failed(NamedTuple):
    """The reply to work that raised."""

    error: BaseException


class Refused(NamedTuple):
    """The reply to who asks for a piece that another thread waits for; the generation goes on."""

    error: BusyError


class Finished(NamedTuple):
    """The reply of a generation that has no more pieces, or the result of a call."""

    value: Any = None


class Progress(NamedTuple):
    """A reply before the last one of a call: how far it is."""

    arguments: tuple[Any, ...]


Reply = Callable[[Any], None]
Work = Callable[[], Generator[Any, Any, None]]


@dataclass(eq=False)
class Request:
    """Work that takes a turn: a generator that runs in the engine, from one piece to the next as these are asked for.

    notebook: asked for by the main thread, whose next such request ends this one. wait: seconds to wait for a turn,
    None without a bound. What follows belongs to the engine. ended: why it is over, an error to raise once; asked: the
    reply that is waited for; consulting: a caller computes what the generator wants sent.
    """

    work: Work
    what: str
    notebook: bool = False
    wait: float | None = None
    dropped: weakref.ref[Any] | None = None
    thread: int = field(default_factory=threading.get_ident)
    deadline: float | None = None
    steps: Generator[Any, Any, None] | None = None
    asked: Reply | None = None
    sent: Any = None
    consulting: bool = False
    over: bool = False
    ended: BusyError | None = None
    last: float = 0.0


class Ask(NamedTuple):
    request: Request
    sent: Any
    reply: Reply


class Cancel(NamedTuple):
    of: Request | Call


class Call(NamedTuple):
    """Work between the steps of whatever generates."""

    work: Callable[[], Any]
    reply: Reply


class Close(NamedTuple):
    reply: Reply | None


class Engine:
    """Serves requests in the order in which they come, one at a time, and calls between their pieces.

    idle: seconds after which a request whose next piece nobody asks for ends while another one waits.
    """

    def __init__(self, idle: float):
        require_unforked()
        self.idle = idle
        self.inbox: SimpleQueue[Any] = SimpleQueue()
        self.process = os.getpid()
        self.owner: weakref.ref[Any] | None = None
        self.on_close: Callable[[], None] | None = None
        self.busy = self.finished = self.exiting = False
        self.reason = CLOSED
        self._current: Request | None = None
        self._waiting: deque[Request] = deque()
        self._calls: deque[Call] = deque()
        self._running: Call | None = None
        self._cancelled: set[Any] = set()
        self._cancellable = False
        self._closing: list[Reply] = []
        self._ending = False
        self._device = mx.default_device()
        _open.add(self)
        self.thread = threading.Thread(target=self._serve, name="mlx_ttd-engine", daemon=True)
        self.thread.start()

    # What other threads call.

    def require_process(self) -> None:
        """BusyError from a forked child, which lacks this thread."""
        if os.getpid() != self.process:
            require_unforked()
            raise BusyError("this model was loaded before the process forked; load it again in the child.")

    def require_open(self) -> None:
        """BusyError from a forked child or after the end."""
        self.require_process()
        if self.ending:
            self._leave_to_the_exit()
            raise BusyError(self.reason)

    def _leave_to_the_exit(self) -> None:
        """Where the interpreter is ending: let it end this thread, a daemon's, which has nobody left to tell."""
        while self.exiting and threading.current_thread() is not threading.main_thread():
            time.sleep(EXIT_SECONDS)

    def require_outside(self) -> None:
        """BusyError where waiting would last for ever: in the engine's thread, and in what a piece has called."""
        if threading.get_ident() == self.thread.ident or self._consulted_here():
            raise BusyError(
                "this model is in the middle of a step, which called this; only stats, encode and tokenizer work here."
            )

    def _consulted_here(self) -> bool:
        request = self._current
        if request is None or not request.consulting or request.thread != threading.get_ident():
            return False
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_code not in CONSULTATIONS:
            frame = frame.f_back
        return frame is not None

    @property
    def ending(self) -> bool:
        """Whether it takes no more requests."""
        return self._ending or self.finished

    def call(
        self, work: Callable[..., Any], show: Callable[..., None] | None = None, within_piece: bool = False
    ) -> Any:
        """The result of `work`, run by the engine between pieces; raises what it raises.

        show: called here with what `work`, which then gets a function to call, reports of its progress. within_piece:
        also from what a piece calls in its caller's thread.
        """
        self.require_open()
        if not within_piece:
            self.require_outside()
        replies: SimpleQueue[Any] = SimpleQueue()
        reply = replies.put
        call = Call(work if show is None else lambda: work(lambda *told: reply(Progress(told))), reply)
        try:
            self.inbox.put(call)
            while isinstance(event := self.wait_for(replies), Progress):
                if show is not None:
                    show(*event.arguments)
        except BaseException:
            self.inbox.put(Cancel(call))
            raise
        return value_of(event)

    def alone(self, work: Callable[[], Any], what: str) -> Any:
        """As `call`, in a turn of its own. `what` it is, for whoever's generation ends by it."""

        def steps() -> Generator[Any, Any, None]:
            yield Finished(work())

        self.require_outside()
        request = Request(steps, what, notebook=threading.current_thread() is threading.main_thread())
        try:
            return value_of(self.ask(request))
        finally:
            self.inbox.put(Cancel(request))

    def ask(self, request: Request, sent: Any = None) -> Any:
        """The next reply to a request, waited for; `sent` goes to its generator."""
        self.require_open()
        replies: SimpleQueue[Any] = SimpleQueue()
        self.inbox.put(Ask(request, sent, replies.put))
        return self.wait_for(replies)

    def wait_for(self, replies: SimpleQueue[Any]) -> Any:
        # An engine that ended before it saw what was asked has emptied its inbox and answers nothing.
        if self.finished:
            self._leave_to_the_exit()
            with suppress(Empty):
                return replies.get(timeout=1.0)
            return Failed(BusyError(self.reason))
        return replies.get()

    def close(self) -> None:
        """End what runs, at its next cancel point or step, and wait until everything is given back."""
        if self.finished or os.getpid() != self.process:
            return
        replies: SimpleQueue[Any] = SimpleQueue()
        if threading.get_ident() == self.thread.ident:
            self.inbox.put(Close(None))
            return
        self.require_outside()
        self.inbox.put(Close(replies.put))
        self.wait_for(replies)

    # What the engine's thread does.

    def _serve(self) -> None:
        mx.set_default_device(self._device)
        stream = take_stream(self._device)
        mx.set_default_stream(stream)
        check_at_cancel_points(self._check)
        try:
            while not self._ending:
                self._receive(self._patience())
                self._advance()
        except BaseException as error:
            self.reason = f"this model's engine failed ({type(error).__name__}: {error}); load it again."
            raise
        finally:
            self._end()
            _streams.append(stream)
            _open.discard(self)

    def _end(self) -> None:
        self._ending = True
        self._finish_current(BusyError(self.reason))
        with suppress(Exception):
            if self.on_close is not None:
                self.on_close()
        self.on_close = None
        self.finished = True
        while True:
            try:
                self._take(self.inbox.get_nowait())
            except Empty:
                break
        for request in self._waiting:
            self._fail(request, BusyError(self.reason))
        for call in self._calls:
            self._reply(call.reply, Failed(BusyError(self.reason)))
        for reply in self._closing:
            self._reply(reply, Finished())
        self._waiting.clear()
        self._calls.clear()

    def _patience(self) -> float | None:
        """Seconds until somebody's waiting ends, None where nobody's does."""
        if not self._waiting:
            return None
        ends = [request.deadline for request in self._waiting if request.deadline is not None]
        if self._left_alone(self._current):
            ends.append(self._current.last + self.idle)
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def _receive(self, seconds: float | None) -> None:
        """Wait for a message, and take all there are."""
        try:
            self._take(self.inbox.get(timeout=seconds))
            while True:
                self._take(self.inbox.get_nowait())
        except Empty:
            pass

    def _take(self, message: Any) -> None:
        if isinstance(message, Ask):
            self._take_ask(message)
        elif isinstance(message, Call):
            self._calls.append(message)
        elif isinstance(message, Cancel):
            self._cancel(message.of)
        elif isinstance(message, Close):
            self._ending = True
            if message.reply is not None:
                self._closing.append(message.reply)
        elif message is self.owner:
            self._ending = True
        else:
            for request in [self._current, *self._waiting]:
                if request is not None and request.dropped is message:
                    self._cancel(request)

    def _take_ask(self, ask: Ask) -> None:
        request = ask.request
        if request.over:
            error, request.ended = request.ended, None
            self._reply(ask.reply, Finished() if error is None else Failed(error))
        elif request.asked is not None or (request.consulting and ask.sent is None):
            busy = "another thread waits for the next piece of this generation already; ask from one at a time."
            self._reply(ask.reply, Refused(BusyError(busy)))
        else:
            request.asked, request.sent, request.consulting = ask.reply, ask.sent, False
            if request is not self._current and request not in self._waiting:
                self._line_up(request)

    def _line_up(self, request: Request) -> None:
        for other in [*self._waiting, self._current]:
            if request.notebook and other is not None and other.notebook:
                self._give_way(other, f"{request.what} in the main thread, which this one was begun in, ended it")
        request.deadline = None if request.wait is None else time.monotonic() + request.wait
        self._waiting.append(request)

    def _give_way(self, request: Request, why: str) -> None:
        request.ended = BusyError(f"this generation is over: {why}; start it again.")
        self._cancel(request)

    def _cancel(self, of: Request | Call) -> None:
        if isinstance(of, Call):
            if of in self._calls:
                self._calls.remove(of)
            elif of is self._running:
                self._cancelled.add(id(of))
        elif of in self._waiting:
            self._waiting.remove(of)
            self._fail(of, of.ended)
        elif of is self._current:
            self._cancelled.add(id(of))

    def _check(self) -> None:
        """Raise Cancelled at a cancel point of work that nobody waits for."""
        if not self._cancellable:
            return
        if not self.inbox.empty():
            self._receive(0)
        what = self._running or self._current
        if self._ending or id(what) in self._cancelled:
            raise Cancelled

    @contextmanager
    def cancellable(self) -> Iterator[None]:
        """A block in which cancel points end work that nobody waits for."""
        self._cancellable = True
        try:
            cancel_point()
            yield
        finally:
            self._cancellable = False

    def _advance(self) -> None:
        """Do all that can be done before the next message."""
        while not self._ending:
            self._drop_cancelled()
            if self._calls:
                self._run_call(self._calls.popleft())
            elif self._current is None and self._waiting:
                self._begin(self._waiting.popleft())
            elif self._current is not None and self._current.asked is not None:
                self._step(self._current)
            else:
                return
            if not self.inbox.empty():
                self._receive(0)

    def _drop_cancelled(self) -> None:
        current, now = self._current, time.monotonic()
        if current is not None and id(current) in self._cancelled:
            self._finish_current(current.ended)
        self._cancelled.clear()
        for request in [r for r in self._waiting if r.deadline is not None and r.deadline <= now]:
            self._waiting.remove(request)
            late = f"this model was used by others for the {request.wait:g} seconds of wait=; try again later."
            self._fail(request, BusyError(late))
        if self._waiting and self._left_alone(self._current) and now >= self._current.last + self.idle:
            idle = f"no piece of it was asked for in {self.idle:g} seconds (idle=) while another one waited"
            self._finish_current(BusyError(f"this generation is over: {idle}; start it again."))

    def _left_alone(self, request: Request | None) -> TypeGuard[Request]:
        """Whether nobody waits for its next piece, nor makes what it waits for."""
        return request is not None and request.asked is None and not request.consulting

    def _begin(self, request: Request) -> None:
        self._current = request
        request.steps = request.work()

    def _run_call(self, call: Call) -> None:
        self._running = call
        try:
            event: Any = Finished(self._run(call.work))
        except Cancelled:
            event = Failed(BusyError(self.reason))
        except BaseException as error:
            event = failure(error)
        finally:
            self._running = None
        self._reply(call.reply, event)

    def _step(self, request: Request) -> None:
        """Run a request to its next reply."""
        assert request.steps is not None
        steps, sent = request.steps, request.sent
        request.sent = None
        try:
            event = self._run(lambda: steps.send(sent))
        except StopIteration:
            event = Finished()
        except Cancelled:
            self._finish_current(BusyError(self.reason) if self._ending else request.ended)
            return
        except BaseException as error:
            event = failure(error)
        request.last = time.monotonic()
        reply, request.asked = request.asked, None
        if isinstance(event, Finished | Failed):
            self._finish_current(None)
        else:
            request.consulting = event.consults
        assert reply is not None
        self._reply(reply, event)

    def _run(self, work: Callable[[], Any]) -> Any:
        self.busy = True
        try:
            return work()
        finally:
            self.busy = False

    def _finish_current(self, ended: BusyError | None) -> None:
        request, self._current = self._current, None
        if request is None:
            return
        if request.steps is not None:
            with suppress(Exception):
                request.steps.close()
            request.steps = None
        self._fail(request, ended)

    def _fail(self, request: Request, error: BusyError | None) -> None:
        """A request is over, and why, which whoever asks next is told once."""
        request.over, request.ended = True, error
        reply, request.asked = request.asked, None
        if reply is not None:
            self._take_ask(Ask(request, None, reply))

    def _reply(self, reply: Reply, event: Any) -> None:
        if self.exiting:
            return
        # An event loop that is closed takes no replies.
        with suppress(RuntimeError):
            reply(event)


# The code of functions that call what belongs to the caller, in the caller's thread, while a piece waits for it.
CONSULTATIONS: set[Any] = set()


def consultation(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function within which waiting for the engine would last for ever."""
    CONSULTATIONS.add(function.__code__)
    return function


def value_of(event: Any) -> Any:
    """What a reply holds, raised where it is an error."""
    if isinstance(event, Failed):
        raise event.error
    return event.value


def failure(error: BaseException) -> Failed:
    """An error to be raised elsewhere, which keeps nothing alive of what the frames held that it went through."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__
    return Failed(error)


def take_stream(device: mx.Device) -> mx.Stream:
    """A stream of MLX on `device` that no engine uses."""
    for stream in list(_streams):
        if stream.device == device:
            with suppress(ValueError):
                _streams.remove(stream)
                return stream
    return mx.new_thread_unsafe_stream(device)


@atexit.register
def _end_all() -> None:
    """Let no thread be inside MLX when the interpreter goes."""
    ending = [engine for engine in list(_open) if engine.process == os.getpid()]
    for engine in ending:
        engine.reason, engine.exiting = "the interpreter is ending.", True
        engine.inbox.put(Close(None))
    for engine in ending:
        engine.thread.join(EXIT_SECONDS)
