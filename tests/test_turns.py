"""Who may use a model when: threads take turns, steps are whole, what is dropped or closed is let go."""

from __future__ import annotations

import copy
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest
from live import forget, live
from test_generate import MEMORY, fresh, ids

import mlx_ttd
from mlx_ttd.errors import BusyError


@pytest.fixture(scope="module")
def llm():
    with mlx_ttd.load("demo", MEMORY, slots=6) as loaded:
        yield loaded


def test_an_unfinished_stream_in_the_main_thread_gives_way(llm):
    stream = llm.stream("And", max_tokens=50)
    next(stream)
    assert llm.generate("And", max_tokens=2).tokens
    with pytest.raises(BusyError, match="another generation in the main thread"):
        next(stream)


def test_threads_take_turns(llm):
    wanted = [fresh(llm, ids(12, seed=s), max_tokens=6, ignore_eos=True).digest for s in range(3)]
    found = [None] * 3

    def work(i):
        found[i] = llm.generate(ids(12, seed=i), max_tokens=6, ignore_eos=True).digest

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == wanted


def step_in_another_thread(llm, in_the_step):
    """Call `in_the_step` from this thread while another is in the middle of reading a prompt; what that one got."""
    begun, go_on, found = threading.Event(), threading.Event(), []

    def pause(done, total):
        begun.set()
        go_on.wait(30)

    thread = threading.Thread(
        target=lambda: found.append(llm.generate(ids(600), max_tokens=4, ignore_eos=True, on_prefill=pause))
    )
    thread.start()
    begun.wait(30)
    try:
        in_the_step()
    finally:
        go_on.set()
        thread.join(60)
    return found[0]


def test_a_model_that_closes_ends_what_another_thread_generates():
    begun, told = threading.Event(), []

    def generate():
        with pytest.raises(BusyError, match="closed") as caught:
            llm.generate(ids(3000), max_tokens=500, on_prefill=lambda done, total: begun.set())
        told.append(caught.value)

    llm = mlx_ttd.load("demo", MEMORY, prefill_chunk=256)
    thread = threading.Thread(target=generate)
    thread.start()
    begun.wait(30)
    llm.close()
    thread.join(30)
    assert (llm.closed, len(told)) == (True, 1)


def test_figures_asked_for_in_the_middle_of_a_step_leave_its_work_alone(llm, monkeypatch):
    settled, settle = [], llm.provider.settle
    monkeypatch.setattr(llm.provider, "settle", lambda: settled.append(threading.current_thread()) or settle())
    wanted = fresh(llm, ids(600), max_tokens=4, ignore_eos=True)
    forget(llm)
    assert step_in_another_thread(llm, llm.stats).digest == wanted.digest
    llm.stats()
    assert {thread.name for thread in settled} == {"mlx_ttd-engine"}


def test_figures_asked_for_all_the_time_change_no_bit(llm):
    wanted, done, calls = fresh(llm, ids(8), max_tokens=100, ignore_eos=True).digest, threading.Event(), []

    def ask():
        while not done.is_set():
            calls.append(llm.stats())

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        assert fresh(llm, ids(8), max_tokens=100, ignore_eos=True).digest == wanted
    finally:
        done.set()
        thread.join(60)
    assert len(calls) > 10


def test_a_thread_that_waited_for_a_model_that_closes_is_told():
    caught = []

    def wait():
        try:
            llm.generate("And", max_tokens=2)
        except BusyError as error:
            caught.append(str(error))

    with mlx_ttd.load("demo", MEMORY) as llm:
        stream = llm.stream("And", max_tokens=50)
        next(stream)
        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.1)
        llm.close()
        thread.join(30)
    assert ["closed" in text for text in caught] == [True]


def in_another_thread(work):
    """What `work` returns, or raises, there."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result(60)


def test_a_stream_that_is_dropped_frees_the_model_for_every_thread(llm):
    def twice():
        for _ in llm.stream("And", max_tokens=50):
            break
        return llm.generate("And", max_tokens=2).tokens

    wanted = fresh(llm, "And", max_tokens=2).tokens
    forget(llm)
    assert in_another_thread(twice) == wanted
    for _ in llm.stream("And", max_tokens=50):
        break
    assert in_another_thread(lambda: llm.generate("And", max_tokens=2).tokens) == wanted


def test_a_state_is_saved_between_the_steps_of_another_thread(llm, tmp_path):
    done = threading.Event()

    def save():
        saved = 0
        while not done.is_set() or not saved:
            if live(llm) is not None and live(llm).tokens:
                llm.save_state(tmp_path / "state")
                saved += 1
        return saved

    forget(llm)
    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(save)
        wanted = llm.generate(ids(8), max_tokens=100, ignore_eos=True)
        done.set()
        assert saving.result(60)
    tokens = llm.restore_state(tmp_path / "state")
    assert [*ids(8), *wanted.tokens][: len(tokens)] == tokens


def test_a_state_and_guesses_of_one_thread_serve_another():
    with mlx_ttd.load("demo", "100MB", slots=6, prefetch="next-layer") as llm:
        wanted = fresh(llm, "And God", max_tokens=50).digest
        assert in_another_thread(lambda: fresh(llm, "And God", max_tokens=50).digest) == wanted
        cache = llm.model.make_cache()
        first = in_another_thread(lambda: np.array(llm.model(mx.array([[1, 2, 3]]), cache=cache)))
        assert np.array_equal(first, np.array(llm.model(mx.array([[1, 2, 3]]))))


def test_a_model_whose_llm_is_gone_says_so():
    model = mlx_ttd.load("demo", MEMORY).model
    with pytest.raises(BusyError, match="its LLM was let go"):
        model(mx.array([[1]]))


def test_a_model_is_not_copied(llm):
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="neither copied nor pickled"):
            attempt(llm)
    assert llm.generate("And", max_tokens=1).tokens


def test_a_closed_model_neither_saves_nor_restores(llm, tmp_path):
    fresh(llm, "And", max_tokens=2)
    llm.save_state(tmp_path / "state")
    closed = mlx_ttd.load("demo", MEMORY)
    closed.close()
    for call in (closed.save_state, closed.restore_state):
        with pytest.raises(BusyError, match="closed"):
            call(tmp_path / "state")


def test_a_callback_that_uses_its_own_model_is_refused(llm):
    with pytest.raises(BusyError, match="in the middle of a step"):
        fresh(llm, ids(40), max_tokens=2, on_prefill=lambda done, total: llm.generate("And", max_tokens=1))
    assert fresh(llm, ids(40), max_tokens=2).tokens
