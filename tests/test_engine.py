"""One thread runs a model: turns, what ends what, event loops, the caller's callables, how threads and programs end."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest
from live import forget
from test_generate import MEMORY, fresh, ids

import mlx_ttd
from mlx_ttd.errors import BusyError, KernelError, OptionError


@pytest.fixture(scope="module")
def llm():
    with mlx_ttd.load("demo", MEMORY, slots=6) as loaded:
        yield loaded


def in_thread(work):
    """What `work` returns, or raises, in a thread of its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result(60)


def python(code, *flags):
    command = [sys.executable, *flags, "-c", textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def threads():
    return sorted(thread.name for thread in threading.enumerate())


def test_steps_run_in_the_engines_thread_alone(llm):
    seen = set()
    decode = llm._core.model.layers[0].mixer
    call = type(decode).__call__

    class Watched(type(decode)):
        def __call__(self, *arguments):
            seen.add(threading.current_thread().name)
            return call(self, *arguments)

    decode.__class__ = Watched
    try:
        fresh(llm, ids(20), max_tokens=2)
        in_thread(lambda: llm.generate(ids(5), max_tokens=2))
        llm.model(mx.array([[1, 2]]))
    finally:
        decode.__class__ = Watched.__base__
    assert seen == {"mlx_ttd-engine"}


@pytest.mark.parametrize("how", ["generate", "set_memory", "restore_state", "clear_experts", "close"])
def test_a_generation_that_another_call_ended_says_so_once(tmp_path, how):
    with mlx_ttd.load("demo", MEMORY) as llm:
        llm.generate("And", max_tokens=2)
        llm.save_state(tmp_path / "state")
        stream = llm.stream("And", max_tokens=50)
        next(stream)
        arguments = {"generate": ("So",), "set_memory": (MEMORY,), "restore_state": (tmp_path / "state",)}
        getattr(llm, how)(*arguments.get(how, ()), **({"max_tokens": 1} if how == "generate" else {}))
        told = "closed" if how == "close" else "another generation" if how == "generate" else how
        with pytest.raises(BusyError, match=told):
            next(stream)
        with pytest.raises(StopIteration):
            next(stream)


def test_a_closed_or_finished_stream_just_ends(llm):
    stream = llm.stream("And", max_tokens=50)
    next(stream)
    stream.close()
    stream.close()
    assert list(stream) == []
    whole = llm.stream("And", max_tokens=2)
    assert len(list(whole)) == 2
    assert list(whole) == []


def test_a_stream_of_which_nobody_asks_anything_ends_when_another_waits():
    with mlx_ttd.load("demo", MEMORY, idle=0.2) as llm:
        wanted = fresh(llm, "And", max_tokens=3).tokens
        left = llm.stream("So", max_tokens=50)
        in_thread(lambda: next(left))
        time.sleep(0.3)
        assert next(left).tokens, "nobody waited"
        began = time.monotonic()
        assert in_thread(lambda: llm.generate("And", max_tokens=3)).tokens == wanted
        assert 0.1 < time.monotonic() - began < 5
        with pytest.raises(BusyError, match=r"no piece of it was asked for in 0\.2 seconds"):
            next(left)


def test_waiting_for_a_turn_can_be_bounded(llm):
    stream = llm.stream("And", max_tokens=50)
    next(stream)
    began = time.monotonic()
    with pytest.raises(BusyError, match=r"wait="):
        in_thread(lambda: llm.generate("So", max_tokens=1, wait=0.2))
    assert 0.1 < time.monotonic() - began < 5
    assert next(stream).tokens
    stream.close()
    assert in_thread(lambda: llm.generate("So", max_tokens=1, wait=0.2)).tokens
    with pytest.raises(OptionError, match="wait"):
        llm.generate("So", wait=-1)


def test_any_thread_asks_for_the_next_piece(llm):
    wanted = fresh(llm, ids(9), max_tokens=12, temperature=0.7, seed=5, ignore_eos=True).tokens
    forget(llm)
    stream = llm.stream(ids(9), max_tokens=12, temperature=0.7, seed=5, ignore_eos=True)
    found = []
    while len(found) < 12:
        found += in_thread(lambda: next(stream)).tokens
        found += next(stream).tokens
    assert tuple(found) == tuple(wanted)


def test_two_threads_that_ask_one_stream_at_once_are_told(llm):
    begun, go_on = threading.Event(), threading.Event()

    def slow(tokens, logits):
        begun.set()
        go_on.wait(30)
        return logits

    stream = llm.stream("And", max_tokens=3, processors=[slow])
    with ThreadPoolExecutor(1) as pool:
        piece = pool.submit(next, stream)
        begun.wait(30)
        try:
            with pytest.raises(BusyError, match="from one at a time"):
                next(stream)
        finally:
            go_on.set()
        assert piece.result(30).tokens
    assert len(list(stream)) == 2


def test_a_stream_dropped_in_a_cycle_with_its_model_ends_both():
    before = threads()
    llm = mlx_ttd.load("demo", MEMORY)
    llm.generate("And", max_tokens=1)

    class Node:
        pass

    node = Node()
    node.llm, node.stream, node.itself = llm, llm.stream("And", max_tokens=50), node
    next(node.stream)
    gone = weakref.ref(node)
    del node, llm
    gc.collect()
    assert gone() is None
    deadline = time.monotonic() + 10
    while threads() != before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threads() == before


def test_a_stream_keeps_its_model(llm):
    assert len(list(mlx_ttd.load("demo", MEMORY).stream("And", max_tokens=4, ignore_eos=True))) == 4


# What belongs to the caller.


def test_processors_run_in_the_thread_that_asks_with_its_arrays(llm):
    seen = []

    def generate():
        bias = mx.zeros((2048,)) + mx.array([0.5])  # lazy, of this thread

        def process(tokens, logits):
            seen.append(threading.get_ident())
            np.array(logits)
            return logits + bias

        return threading.get_ident(), llm.generate(ids(7), max_tokens=4, processors=[process], ignore_eos=True).tokens

    wanted = fresh(llm, ids(7), max_tokens=4, ignore_eos=True).tokens
    thread, tokens = in_thread(generate)
    assert (set(seen), tokens) == ({thread}, wanted)
    thread, tokens = generate()
    assert tokens == wanted


def test_a_processor_draws_from_its_threads_random_numbers(llm):
    def noisy(tokens, logits):
        return logits + mx.random.normal(logits.shape)

    def generate():
        mx.random.seed(3)
        return fresh(llm, ids(7), max_tokens=6, processors=[noisy], ignore_eos=True).tokens

    assert generate() == generate()


def test_a_processor_may_ask_for_figures_and_tokens_and_is_refused_what_would_wait(llm, tmp_path):
    refused, figures = [], []

    def process(tokens, logits):
        figures.append(llm.stats().counters.decode_steps)
        llm.encode("And")
        for call in (
            lambda: llm.generate("And", max_tokens=1),
            lambda: next(llm.stream("And")),
            llm.close,
            lambda: llm.set_memory(MEMORY),
            lambda: llm.save_state(tmp_path / "s"),
            lambda: llm.restore_state(tmp_path / "s"),
            llm.clear_experts,
            lambda: llm.model(mx.array([[1]])),
        ):
            with pytest.raises(BusyError, match="in the middle of a step"):
                call()
            refused.append(call)
        return logits

    assert len(fresh(llm, ids(7), max_tokens=3, processors=[process], ignore_eos=True).tokens) == 3
    assert (len(refused), len(figures)) == (24, 3)
    assert figures[2] == figures[0] + 2


@pytest.mark.parametrize("option", ["processors", "on_prefill"])
def test_a_callable_that_raises_costs_its_generation_alone(llm, option):
    def fail(*arguments):
        raise LookupError("mine")

    wanted = fresh(llm, ids(40), max_tokens=3).digest
    forget(llm)
    with pytest.raises(LookupError, match="mine"):
        llm.generate(ids(40), max_tokens=3, **{option: [fail] if option == "processors" else fail})
    assert llm.generate(ids(40), max_tokens=3).digest == wanted


def test_a_kept_exception_keeps_no_state():
    def fail(tokens, logits):
        raise LookupError

    llm = mlx_ttd.load("demo", MEMORY)
    with pytest.raises(LookupError) as kept:
        llm.generate(ids(40), max_tokens=3, processors=[fail])
    mx.clear_cache()
    before = mx.get_active_memory()
    llm.close()
    assert kept.value is not None
    assert mx.get_active_memory() < before - llm._core.division.state


# Event loops.


def test_pieces_for_an_event_loop(llm):
    wanted = [fresh(llm, ids(9, seed=s), max_tokens=6, ignore_eos=True).tokens for s in range(5)]

    async def answer(seed):
        stream = llm.astream(ids(9, seed=seed), max_tokens=6, ignore_eos=True)
        return tuple([t async for chunk in stream for t in chunk.tokens])

    async def all_at_once():
        return await asyncio.gather(*(answer(seed) for seed in range(5)))

    assert asyncio.run(all_at_once()) == [tuple(tokens) for tokens in wanted]


def test_a_task_that_is_cancelled_frees_the_model(llm):
    wanted = fresh(llm, ids(9), max_tokens=4, ignore_eos=True).tokens

    async def left():
        async for _ in llm.astream(ids(600), max_tokens=500, ignore_eos=True):
            await asyncio.sleep(0)

    async def main():
        task = asyncio.create_task(left())
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        stream = llm.astream(ids(9), max_tokens=50, ignore_eos=True)
        async for _ in stream:
            break
        await stream.aclose()
        assert [chunk async for chunk in stream] == []

    asyncio.run(main())
    assert llm.generate(ids(9), max_tokens=4, ignore_eos=True).tokens == wanted


def test_an_event_loop_that_is_gone_blocks_nobody(llm):
    async def begin():
        stream = llm.astream("And", max_tokens=50)
        await anext(stream)
        return stream

    stream = asyncio.run(begin())
    del stream
    assert in_thread(lambda: llm.generate("And", max_tokens=2)).tokens


def test_errors_reach_an_event_loop(llm):
    async def begin(**options):
        async for _ in llm.astream("And", **options):
            pass

    with pytest.raises(OptionError):
        asyncio.run(begin(temperature=-1.0))


# The mlx-lm protocol.


def test_a_cache_moves_when_its_caller_has_the_result(llm):
    cache = llm.model.make_cache()
    llm.model(mx.array([ids(20)]), cache=cache)
    steps = [mx.array([[token]]) for token in (7, *ids(6, seed=3))]
    wanted = [np.array(llm.model(one, cache=cache)) for one in steps]
    again = llm.model.make_cache()
    llm.model(mx.array([ids(20)]), cache=again)
    moments, call = [], llm.engine.call

    def lost(work, *arguments, **options):
        call(work, *arguments, **options)
        raise KeyboardInterrupt

    moments.append([c.offset for c in again])
    llm.engine.call = lost
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.model(mx.array([[9]]), cache=again)
        with pytest.raises(KeyboardInterrupt):
            llm.model(mx.array([ids(300, seed=2)]), cache=again)
    finally:
        del llm.engine.call
    assert [c.offset for c in again] == moments[0] == [20] * len(again)
    found = [np.array(llm.model(one, cache=again)) for one in steps]
    assert all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_cache_of_another_kind_is_refused(llm):
    cache, other = llm.model.make_cache(), llm.model.make_cache()
    for wrong in ([], cache[:2], [*cache[:-1], other[-1]], [None] * len(cache)):
        with pytest.raises(KernelError, match="make_cache"):
            llm.model(mx.array([[1]]), cache=wrong)


def test_a_call_through_the_protocol_leaves_a_stream_alone(llm):
    wanted = fresh(llm, ids(9), max_tokens=8, ignore_eos=True).tokens
    forget(llm)
    found = []
    for chunk in llm.stream(ids(9), max_tokens=8, ignore_eos=True):
        found += chunk.tokens
        llm.model(mx.array([ids(5)]))
    assert tuple(found) == tuple(wanted)


# Ends.


def test_a_program_ends_while_a_daemon_thread_generates():
    done = python(
        """
        import threading, time, mlx_ttd
        llm = mlx_ttd.load("demo", "300MB", slots=5)
        def forever():
            while True:
                llm.generate([5] * 3000, max_tokens=500, ignore_eos=True)
        for _ in range(3):
            threading.Thread(target=forever, daemon=True).start()
        time.sleep(1)
        print("ending", flush=True)
        """,
        "-X",
        "dev",
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "ending", "")


@pytest.mark.parametrize("call", ["load", "generate", "stats", "convert"])
def test_a_child_forked_after_mlx_was_used_is_refused_in_a_sentence(call, tmp_path):
    done = python(
        f"""
        import os, time, warnings, mlx_ttd, mlx_ttd.errors
        warnings.simplefilter("ignore")
        llm = mlx_ttd.load("demo", "300MB", slots=5)
        llm.generate("And", max_tokens=2)
        calls = dict(load=lambda: mlx_ttd.load("demo", "300MB"), generate=lambda: llm.generate("And"),
                     stats=llm.stats, convert=lambda: mlx_ttd.convert("nowhere", {str(tmp_path / "x.ttd")!r}))
        child = os.fork()
        if child == 0:
            began = time.monotonic()
            try:
                calls[{call!r}]()
            except mlx_ttd.errors.BusyError as error:
                os._exit(0 if "start a fresh process" in str(error) and time.monotonic() - began < 1 else 1)
            os._exit(2)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert llm.generate("And", max_tokens=2).tokens
        raise SystemExit(code)
        """
    )
    assert done.returncode == 0, done.stderr


def test_a_child_forked_after_a_host_used_mlx_is_refused_and_one_forked_after_an_import_works():
    code = """
        import os, warnings, mlx.core as mx, mlx_ttd, mlx_ttd.errors
        warnings.simplefilter("ignore")
        {before}
        child = os.fork()
        if child == 0:
            try:
                tokens = mlx_ttd.load("demo", "300MB").generate("And", max_tokens=2).tokens
            except mlx_ttd.errors.BusyError as error:
                os._exit(3)
            os._exit(0 if len(tokens) == 2 else 1)
        raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
    assert python(code.format(before="mx.eval(mx.zeros(3) + 1)")).returncode == 3
    assert python(code.format(before="pass")).returncode == 0
