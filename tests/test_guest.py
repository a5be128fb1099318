"""As a guest in another program: no side effects, clear refusals, threads, event loops, forks, clean exits."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import mlx_ttd
from mlx_ttd.errors import KernelError, OptionError, TTDError
from mlx_ttd.layers import StreamedExperts

MEMORY = "300MB"


def python(code, *flags):
    command = [sys.executable, *flags, "-c", textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_import_changes_nothing_in_the_process():
    done = python(
        """
        import signal, threading, logging, socket
        import mlx.core as mx
        def refuse(*a, **k): raise AssertionError("network at import")
        socket.socket.connect = refuse
        def state():
            handler = signal.getsignal(signal.SIGINT)
            return handler, threading.active_count(), mx.default_device(), len(logging.root.handlers)
        before = state()
        import mlx_ttd, sys
        assert state() == before
        assert "transformers" not in sys.modules and "torch" not in sys.modules
        assert "tokenizers" not in sys.modules and "jinja2" not in sys.modules
        """
    )
    assert done.returncode == 0, done.stderr


def test_a_program_exits_cleanly_with_a_model_open():
    done = python(
        """
        import threading, mlx_ttd
        llm = mlx_ttd.load("demo", "300MB", slots=5)
        worker = threading.Thread(target=lambda: llm.generate("And", max_tokens=3))
        worker.start(); worker.join()
        stream = llm.stream("And", max_tokens=9); next(stream)
        """,
        "-X",
        "dev",
    )
    assert done.returncode == 0
    assert done.stderr == ""


def test_a_forked_child_is_refused_in_a_sentence():
    done = python(
        """
        import os, warnings, mlx_ttd
        warnings.simplefilter("ignore")
        llm = mlx_ttd.load("demo", "300MB", slots=5)
        llm.generate("And", max_tokens=2)
        child = os.fork()
        if child == 0:
            try:
                llm.generate("And", max_tokens=2)
            except mlx_ttd.TTDError as error:
                os._exit(0 if "forked" in str(error) else 1)
            os._exit(2)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert llm.generate("And", max_tokens=2).tokens
        raise SystemExit(code)
        """
    )
    assert done.returncode == 0, done.stderr


def test_an_event_loop_serves_two_at_once():
    async def answer(llm, seed):
        prompt = np.random.default_rng(seed).integers(0, 2000, 10).tolist()
        return (await asyncio.to_thread(llm.generate, prompt, max_tokens=6, ignore_eos=True)).digest

    async def both(llm):
        return await asyncio.gather(*(answer(llm, seed) for seed in range(4)))

    with mlx_ttd.load("demo", MEMORY, slots=6) as llm:
        alone = [asyncio.run(answer(llm, seed)) for seed in range(4)]
        assert asyncio.run(both(llm)) == alone


def test_two_models_on_one_store_share_the_machine():
    with mlx_ttd.load("demo", MEMORY, slots=5) as first, mlx_ttd.load("demo", MEMORY, slots=9) as second:
        streams = [llm.stream("In the beginning", max_tokens=8) for llm in (first, second)]
        pairs = list(zip(*streams, strict=True))
    assert all(a.text == b.text for a, b in pairs)


def test_own_embeddings_in_and_hidden_states_out():
    with mlx_ttd.load("demo", MEMORY) as llm:
        tokens = [5, 6, 7, 8]
        state = llm.model.make_cache()
        hidden = llm.model.hidden_states(llm.model.embed(np.array(tokens)), state, "prefill")
        assert hidden.shape == (4, llm.store.spec.hidden)
        logits = llm.model.logits(hidden, "prefill")
        assert mx.array_equal(logits, llm.model(mx.array([tokens]))[0])
        window = llm.model.logits(hidden[-1:], "decode", window=(100, 164))
        assert mx.array_equal(window, llm.model.logits(hidden[-1:], "decode")[:, 100:164])


def test_streamed_experts_serve_a_model_of_ones_own():
    with mlx_ttd.load("demo", MEMORY, slots=6) as llm:
        layer = StreamedExperts(llm.provider, 2)
        x = mx.random.normal((3, llm.store.spec.hidden), key=mx.random.key(0))
        ids, weights = mx.array([[0, 3, 9, 11]] * 3, mx.int32), mx.full((3, 4), 0.25)
        out = layer(x, ids, weights, "verify")
        rows = [layer(x[i : i + 1], ids[i : i + 1], weights[i : i + 1], "decode") for i in range(3)]
        assert mx.array_equal(out, mx.concatenate(rows))


@pytest.mark.parametrize("transform", [mx.compile, mx.grad, mx.vmap])
def test_transformations_are_refused_in_a_sentence(transform):
    with mlx_ttd.load("demo", MEMORY, slots=5) as llm:
        layer = StreamedExperts(llm.provider, 0)
        ids, weights = mx.array([[0, 1, 2, 3]], mx.int32), mx.full((1, 4), 0.25)

        def call(x):
            return layer(x.reshape(1, -1), ids + (x.sum() > 1e9).astype(mx.int32), weights, "decode").sum()

        with pytest.raises(KernelError, match=r"mx\.compile"):
            mx.eval(transform(call)(mx.ones((1, llm.store.spec.hidden))))


def test_batches_are_refused_in_a_sentence():
    with mlx_ttd.load("demo", MEMORY) as llm, pytest.raises(KernelError, match=r"one sequence"):
        llm.model(mx.zeros((2, 3), mx.int32))


@pytest.mark.parametrize("token", [-1, 2048, 1 << 30])
def test_a_token_outside_the_vocabulary_is_refused_in_a_sentence(token):
    with mlx_ttd.load("demo", MEMORY) as llm:
        with pytest.raises(OptionError, match=rf"^token {token} is outside the vocabulary of 2,048\.$"):
            llm.model(mx.array([[5, token]]))
        llm.model(mx.array([[0, 2047]]))


def test_every_error_has_one_base():
    from mlx_ttd import errors

    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert all(issubclass(kind, TTDError) for kind in kinds)


def resident_kilobytes():
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_two_hundred_lives_leave_nothing_behind():
    sizes, arrays = [], []
    for life in range(200):
        with mlx_ttd.load("demo", MEMORY, slots=6) as llm:
            llm.generate("In the beginning", max_tokens=4)
        if life >= 50:
            gc.collect()
            sizes.append(resident_kilobytes())
            arrays.append(mx.get_active_memory())
    slope = np.polyfit(np.arange(len(sizes)), sizes, 1)[0]
    assert slope < 20
    assert max(arrays) == min(arrays)
    assert len(os.listdir("/proc/self/fd")) < 40
