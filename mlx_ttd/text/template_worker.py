"""A process that renders templates, as its owner holds it: started, asked and ended.

Its owner is a thread that no Ctrl-C reaches, so that descriptors and process ids are never dropped half-way.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from ..errors import TemplateError
from .template_process.frames import HEAD, READY, body_length, head_of

LOOK_SECONDS = 0.05
PIECE = 1 << 16
PROGRAM = "import sys; sys.path += sys.argv[1:]; from template_process.serve import serve; serve()"


class Ended(Exception):
    """The process has closed its pipes."""


class Worker:
    """A started process; TemplateError when none can be."""

    def __init__(self) -> None:
        command = [sys.executable, "-I", "-S", "-c", PROGRAM, *search_paths()]
        its_requests, self.requests = os.pipe()
        self.answers, its_answers = os.pipe()
        try:
            # A process group of its own gets no Ctrl-C of the terminal.
            self.pid = os.posix_spawn(
                *(command[0], command, os.environ),
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, its_requests, 0),
                    (os.POSIX_SPAWN_DUP2, its_answers, 1),
                    (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
                ],
                setpgroup=0,
                setsigmask=(),
                setsigdef=(signal.SIGPIPE,),
            )
        except (OSError, TypeError, ValueError) as error:
            self.close()
            raise TemplateError(
                f"Chat templates run in a process of their own, and none could be started: {error}; "
                "allow this program one more, or pass the prompt as a string."
            ) from None
        finally:
            os.close(its_requests)
            os.close(its_answers)
        os.set_blocking(self.requests, False)
        os.set_blocking(self.answers, False)

    def be_ready(self, look: Callable[[], None]) -> None:
        """Wait until the new process can be asked; exceptions as in `ask`."""
        self._exchange(b"", lambda found: found == READY, look)

    def ask(self, request: bytes, longest: int, look: Callable[[], None]) -> bytes:
        """The answer, of at most `longest` bytes; Ended, or whatever `look`, called all the while, raises."""

        def whole(found: bytearray) -> bool:
            if len(found) < HEAD:
                return False
            length = body_length(found[:HEAD])
            if not 0 < length <= longest or len(found) > HEAD + length:
                raise TemplateError("The process that renders chat templates answered with something else.")
            return len(found) == HEAD + length

        return bytes(memoryview(self._exchange(head_of(request) + request, whole, look))[HEAD:])

    def _exchange(self, request: bytes, is_whole: Callable[[bytearray], bool], look: Callable[[], None]) -> bytearray:
        left, found, poll = memoryview(request), bytearray(), select.poll()
        poll.register(self.answers, select.POLLIN)
        if left:
            poll.register(self.requests, select.POLLOUT)
        while not is_whole(found):
            look()
            for descriptor, _ in poll.poll(LOOK_SECONDS * 1000):
                if descriptor == self.answers:
                    piece = os.read(descriptor, PIECE)
                    if not piece:
                        raise Ended
                    found += piece
                    continue
                try:
                    left = left[os.write(descriptor, left[:PIECE]) :]
                except BrokenPipeError:
                    raise Ended from None
                if not left:
                    poll.unregister(descriptor)
        return found

    def is_idle(self) -> bool:
        """Whether the process, which has no request, is still there and silent."""
        poll = select.poll()
        poll.register(self.answers, select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        """Close this side of the pipes; the process ends when it next waits for a request."""
        os.close(self.requests)
        os.close(self.answers)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def end(self) -> int:
        """Kill the process and take its exit code: negative, the signal that ended it."""
        self.close()
        self.kill()
        with suppress(ChildProcessError):
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return 0


@lru_cache
def search_paths() -> tuple[str, ...]:
    """Where the process finds its own modules and Jinja, whatever way each was installed."""
    found = {str(Path(__file__).resolve().parent): None}
    for name in ("jinja2", "markupsafe"):
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            raise TemplateError(f"Chat templates need {name}, which is not installed; install it with pip.")
        found[str(Path(spec.origin).resolve().parents[1])] = None
    return tuple(found)
