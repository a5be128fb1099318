"""The live sequence of a model, as tests look at it and drop it."""

from __future__ import annotations


def live(llm):
    """The live sequence, None without one."""
    return llm._core.sequence


def forget(llm):
    """Let the next prompt be read from its beginning."""
    llm.engine.call(lambda: setattr(llm._core, "sequence", None))
