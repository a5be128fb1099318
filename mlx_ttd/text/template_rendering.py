"""Renders templates apart: each in a process that is ended where the template takes too long or too much memory.

A thread of its own carries out each rendering. The caller only waits for it, so that a Ctrl-C, which may come between
any two steps, leaves nothing half done: the thread sees that nobody waits and ends the process.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from _thread import start_new_thread
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from queue import SimpleQueue
from typing import Any

from ..errors import TemplateError
from .limits import Limits
from .process_memory import resident_bytes
from .template_process.frames import RENDERED, as_text, packed
from .template_worker import Ended, Worker

WORKERS = 2
START_SECONDS = 60.0
REQUEST_BYTES = 64 << 20
# A process that holds more than this at rest is ended.
KEPT_BYTES = 64 << 20
# What a process may hold of a request while it reads it, in bytes for each of its own.
COPIES = 10
SENTENCE_BYTES = 4000


class Processes:
    """Up to WORKERS of them: `idle` may be asked, `live` are all that were started, a slot allows one rendering."""

    def __init__(self) -> None:
        self.idle: deque[Worker] = deque()
        self.live: set[Worker] = set()
        self.slots: SimpleQueue[None] = SimpleQueue()
        for _ in range(WORKERS):
            self.slots.put(None)


processes = Processes()


def forget_processes() -> None:
    """In a forked child: they are the parent's."""
    global processes
    for worker in processes.live:
        worker.close()
    processes = Processes()


os.register_at_fork(after_in_child=forget_processes)


@atexit.register
def kill_processes() -> None:
    for worker in tuple(processes.live):
        worker.kill()


@dataclass
class Rendering:
    """A request, what it may use, and where the answer is put: whether it was rendered, and the text or a sentence."""

    request: bytes
    limits: Limits
    answer: SimpleQueue[tuple[bool, str]] = field(default_factory=SimpleQueue)
    abandoned: bool = False


def run_template(text: str, values: Mapping[str, Any], limits: Limits) -> str:
    """Render `text`; any failure becomes one TemplateError that names the line."""
    bounds = limits.characters, limits.seconds, limits.memory
    try:
        request = packed([text, values, *bounds, datetime.now().isoformat()])
    except ValueError as error:
        raise TemplateError(f"The conversation cannot be handed to its chat template: {error}.") from None
    if len(request) > REQUEST_BYTES:
        raise TemplateError(
            f"The conversation is longer than {REQUEST_BYTES >> 20} MB, more than a chat template is given; shorten it."
        )
    rendering = Rendering(request, limits)
    try:
        # Not a threading.Thread, which an interrupt while it starts leaves waiting for ever.
        start_new_thread(carry_out, (rendering, processes))
        rendered, found = rendering.answer.get()
    except RuntimeError as error:
        raise TemplateError(f"No thread could be started to render the chat template: {error}.") from None
    finally:
        rendering.abandoned = True
    if not rendered:
        raise TemplateError(found)
    return found


def carry_out(rendering: Rendering, among: Processes) -> None:
    """In a thread of its own."""
    answer = False, "The rendering of the chat template was given up."
    try:
        among.slots.get()
        try:
            answer = ask_a_worker(rendering, among)
        finally:
            among.slots.put(None)
    except TemplateError as error:
        answer = False, str(error)
    except Exception as error:
        answer = False, f"The chat template could not be rendered: {type(error).__name__}: {error}."
    finally:
        rendering.answer.put(answer)


def ask_a_worker(rendering: Rendering, among: Processes) -> tuple[bool, str]:
    limits = rendering.limits
    late = f"The chat template ran for more than {limits.seconds:g} s; pass another template."
    most = KEPT_BYTES + limits.memory + COPIES * len(rendering.request)
    longest = 1 + max(SENTENCE_BYTES, 4 * limits.characters)
    worker = ready_worker(rendering, among, most)
    try:
        found = worker.ask(rendering.request, longest, watch(rendering, worker, limits.seconds, late, most))
    except Ended:
        code = end(worker, among)
        raise TemplateError(
            f"The chat template ended the process that rendered it, with exit code {code}; pass another template."
        ) from None
    except BaseException:
        end(worker, among)
        raise
    if resident_bytes(worker.pid) < KEPT_BYTES:
        among.idle.append(worker)
    else:
        end(worker, among)
    return found[:1] == RENDERED, as_text(found[1:])


def ready_worker(rendering: Rendering, among: Processes, most: int) -> Worker:
    """An idle process, or a new one."""
    with suppress(IndexError):
        while worker := among.idle.pop():
            if worker.is_idle():
                return worker
            end(worker, among)
    worker = Worker()
    among.live.add(worker)
    late = f"The process that renders chat templates did not start within {START_SECONDS:g} s."
    try:
        worker.be_ready(watch(rendering, worker, START_SECONDS, late, most))
    except Ended:
        code = end(worker, among)
        raise TemplateError(
            f"The process that renders chat templates ended at its start, with exit code {code}; "
            f"check that {sys.executable} runs and imports jinja2."
        ) from None
    except BaseException:
        end(worker, among)
        raise
    return worker


def watch(rendering: Rendering, worker: Worker, seconds: float, late: str, most: int) -> Callable[[], None]:
    """A function that raises TemplateError when nobody waits any more, after `seconds`, or over `most` bytes."""
    deadline = time.monotonic() + seconds

    def look() -> None:
        if rendering.abandoned:
            raise TemplateError("The rendering of the chat template was given up.")
        if time.monotonic() > deadline:
            raise TemplateError(late)
        if resident_bytes(worker.pid) > most:
            raise TemplateError(f"The chat template takes more than {rendering.limits.memory >> 20} MB.")

    return look


def end(worker: Worker, among: Processes) -> int:
    among.live.discard(worker)
    return worker.end()
