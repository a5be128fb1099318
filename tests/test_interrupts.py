"""Ctrl-C at any moment: the next call has the bits of a fresh model, no pin is left, nothing hangs, figures are there.

An interrupt is raised before each bytecode that the caller's thread runs in the library and in what of the standard
library it calls, and comes as a real signal at random moments.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import sysconfig
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from test_generate import ids

import mlx_ttd

LIBRARY = str(Path(mlx_ttd.__file__).parent)
TRACED = (LIBRARY, sysconfig.get_paths()["stdlib"])
PROMPT = ids(300)
SECONDS = 10


class Interrupter:
    """Counts the bytecodes of a block in this thread, and raises KeyboardInterrupt before number `at`."""

    def __init__(self, at=None):
        self.at, self.seen, self.inside = at, 0, 0

    def trace(self, frame, event, argument):
        name = frame.f_code.co_filename
        if not name.startswith(TRACED) or ("site-packages" in name and not name.startswith(LIBRARY)):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.seen += 1
            if self.seen == self.at:
                raise KeyboardInterrupt
        return self.trace

    def __enter__(self):
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_):
        sys.settrace(None)


@contextmanager
def within_seconds():
    began = time.monotonic()
    yield
    assert time.monotonic() - began < SECONDS


def least():
    return mlx_ttd.info("demo")["least_bytes"]


def load():
    return mlx_ttd.load("demo", least(), prefill_chunk=256)


def generation(llm):
    found = llm.generate(PROMPT, max_tokens=3, ignore_eos=True)
    return tuple(found.tokens), found.logits_digest


def assert_sound(llm, wanted):
    """The next call has the bits of a fresh model, and so on."""
    with within_seconds():
        assert generation(llm) == wanted
        assert llm.stats().counters.decode_steps
        assert not llm.provider.lent


@pytest.fixture(scope="module")
def wanted():
    with load() as llm:
        return generation(llm)


def moments(work, step, first=1):
    """Interrupters at every `step`th bytecode of `work`, as counted in one run of it."""
    with Interrupter() as counted:
        work()
    assert counted.seen > 50
    return [Interrupter(at) for at in range(first, counted.seen + 1, step)]


def prompt_then(llm, step, wanted, work):
    """Interrupt `work`, after a generation, at its bytecodes."""
    work()
    for interrupter in moments(work, step):
        with suppress(KeyboardInterrupt), within_seconds(), interrupter:
            work()
        assert_sound(llm, wanted)


# Every bytecode takes hours of CI's two cores together: by hand, MLX_INTERRUPT_STEP=1 with -m slow.
STEP = int(os.environ.get("MLX_INTERRUPT_STEP", "61"))
EVERY = [pytest.param(397, id="some"), pytest.param(STEP, id="more", marks=[pytest.mark.slow])]


@pytest.mark.parametrize("step", EVERY)
def test_an_interrupted_generation(wanted, step):
    with load() as llm:
        prompt_then(llm, step, wanted, lambda: generation(llm))


@pytest.mark.parametrize("step", EVERY)
def test_an_interrupted_stream_that_is_kept(wanted, step):
    kept = []
    with load() as llm:

        def work():
            stream = llm.stream(ids(20), max_tokens=3, ignore_eos=True)
            kept.append(stream)
            list(stream)

        prompt_then(llm, step, wanted, work)


@pytest.mark.parametrize("step", EVERY)
def test_an_interrupted_save(wanted, step, tmp_path):
    with load() as llm:
        generation(llm)
        prompt_then(llm, step, wanted, lambda: llm.save_state(tmp_path / "state"))
        llm.save_state(tmp_path / "state")
        assert llm.restore_state(tmp_path / "state")[: len(PROMPT)] == PROMPT


@pytest.mark.parametrize("step", EVERY)
def test_an_interrupted_change_of_memory(wanted, step):
    memory = least()
    with load() as llm:

        def change():
            llm.set_memory(memory + 20_000_000)
            llm.set_memory(memory)

        prompt_then(llm, step, wanted, change)


@pytest.mark.parametrize("step", EVERY)
def test_an_interrupted_close(wanted, step):
    threads = threading.active_count()

    def open_and_close(interrupter):
        llm = load()
        generation(llm)
        with suppress(KeyboardInterrupt), within_seconds(), interrupter:
            llm.close()
        with within_seconds():
            llm.close()
        assert llm.closed

    counted = Interrupter()
    open_and_close(counted)
    assert counted.seen > 10
    for at in range(1, counted.seen + 1, step if step == 1 else 11):
        open_and_close(Interrupter(at))
    deadline = time.monotonic() + SECONDS
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= threads
    with load() as llm:
        assert generation(llm) == wanted


@pytest.mark.oracle
@pytest.mark.timeout(3000)
def test_an_interrupted_model_under_mlx_lm(wanted):
    from mlx_lm.generate import generate_step

    with load() as llm:

        def work(cache):
            steps = generate_step(mx.array(PROMPT[:40]), llm.model, max_tokens=3, prompt_cache=cache)
            return [int(token) for token, _ in steps]

        text = work(llm.model.make_cache())
        for interrupter in moments(lambda: work(llm.model.make_cache()), STEP):
            cache = llm.model.make_cache()
            llm.model(mx.array([[5, 6, 7]]), cache=cache)
            before, offset = np.array(cache[0].state[0]), cache[0].offset
            with suppress(KeyboardInterrupt), within_seconds(), interrupter:
                work(cache)
            if cache[0].offset == offset:
                assert np.array_equal(np.array(cache[0].state[0]), before)
            assert len({layer.offset for layer in cache}) == 1
            assert work(llm.model.make_cache()) == text
        assert_sound(llm, wanted)


@pytest.mark.parametrize("count", [pytest.param(20, id="some"), pytest.param(200, id="more", marks=pytest.mark.slow)])
def test_real_signals_at_random_moments(wanted, count):
    draw = random.Random(count)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupted = 0
    try:
        with load() as llm:
            generation(llm)
            began = time.perf_counter()
            llm.generate(ids(300, seed=1), max_tokens=3, ignore_eos=True)
            length = time.perf_counter() - began
            for turn in range(count):
                sender = threading.Timer(draw.uniform(0, length), os.kill, (os.getpid(), signal.SIGINT))
                try:
                    with within_seconds():
                        sender.start()
                        llm.generate(ids(300, seed=turn), max_tokens=3, ignore_eos=True)
                        sender.join()
                        time.sleep(0.001)
                except KeyboardInterrupt:
                    interrupted += 1
                sender.join()
                assert_sound(llm, wanted)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert interrupted > count / 2
