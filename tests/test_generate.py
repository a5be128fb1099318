"""Generation through the API on the demo model: lengths, stops, continuing, saving, closing."""

from __future__ import annotations

import os
import signal
import threading
import time
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from live import forget, live

import mlx_ttd
from mlx_ttd import kernels
from mlx_ttd.allocation import divide_budget
from mlx_ttd.errors import BudgetError, BusyError, ContextError, OptionError, StateError, StoreError
from mlx_ttd.generation import token_digest
from mlx_ttd.options import make_options
from mlx_ttd.store import open_store
from mlx_ttd.streaming import memory

MEMORY = "300MB"


@pytest.fixture(scope="module")
def llm():
    with mlx_ttd.load("demo", MEMORY, slots=6) as loaded:
        yield loaded


def ids(count, seed=0):
    return np.random.default_rng(seed).integers(0, 2000, count).tolist()


def fresh(llm, prompt, **options):
    forget(llm)
    return llm.generate(prompt, **options)


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 63, 64, 65])
def test_prompt_lengths(llm, length):
    response = fresh(llm, ids(length), max_tokens=3, ignore_eos=True)
    assert len(response.tokens) == 3
    assert response.prompt_tokens == length
    cache = llm.model.make_cache()
    steps = [llm.model(mx.array([[token]]), cache=cache)[0, 0] for token in ids(length)]
    assert int(mx.argmax(steps[-1])) == response.tokens[0]


@pytest.mark.slow
def test_a_prompt_that_fills_the_context(llm):
    response = fresh(llm, ids(4096), max_tokens=5, ignore_eos=True)
    assert len(response.tokens) == 1
    assert response.finish_reason == "length"


def test_a_response_tells_how_long_its_steps_took(llm):
    response = fresh(llm, ids(8), max_tokens=6, ignore_eos=True)
    assert len(response.step_seconds) == len(response.step_misses) == 6
    assert 0 < response.latency(50) <= response.latency(95) <= max(response.step_seconds)


def test_a_prompt_longer_than_the_context_is_refused(llm):
    with pytest.raises(ContextError, match=r"4,097 tokens.*load with context="):
        llm.generate(ids(4097))
    with pytest.raises(ContextError, match="40,000 tokens and the model takes at most 32,768; shorten it"):
        llm.generate(ids(40_000))


def test_stream_and_generate_agree(llm):
    forget(llm)
    chunks = list(llm.stream("In the beginning", max_tokens=20))
    response = fresh(llm, "In the beginning", max_tokens=20)
    assert "".join(chunk.text for chunk in chunks) == response.text
    assert sum((chunk.tokens for chunk in chunks), ()) == tuple(response.tokens)
    assert chunks[-1].finish_reason == response.finish_reason == "length"
    assert response.digest == token_digest(response.tokens)
    assert response.tokens_per_second > 0


def test_stop_strings_cut_the_text(llm):
    whole = fresh(llm, "In the beginning", max_tokens=30).text
    word = whole.split()[6]
    cut = fresh(llm, "In the beginning", max_tokens=30, stop=word)
    assert cut.text == whole[: whole.index(word)]
    assert cut.finish_reason == "stop"


def test_seeds_repeat_and_differ(llm):
    options = {"max_tokens": 12, "temperature": 1.0, "ignore_eos": True}
    first, again, other = (fresh(llm, "And", seed=seed, **options).tokens for seed in (1, 1, 2))
    assert first == again != other


def test_logprobs_and_processors(llm):
    response = fresh(llm, "And", max_tokens=4, logprobs=True, ignore_eos=True)
    assert len(response.logprobs) == 4
    assert all(p <= 0 for p in response.logprobs)
    only = 77

    def force(tokens, logits):
        return mx.where(mx.arange(logits.shape[0]) == only, 0.0, -mx.inf)

    assert set(fresh(llm, "And", max_tokens=4, processors=[force]).tokens) == {only}


def test_scores_are_those_of_generating_the_same_tokens(llm):
    made = fresh(llm, "In the beginning", max_tokens=9, logprobs=True, ignore_eos=True)
    forget(llm)
    scored = llm.score("In the beginning", made.tokens)
    assert scored.logprobs == made.logprobs
    assert (scored.digest, scored.logits_digest) == (made.digest, made.logits_digest)
    end = llm.tokenizer.token_id("<|im_end|>")
    assert fresh(llm, "And", force=[end, 5, 6], max_tokens=1).tokens == [end, 5, 6]


def test_a_text_is_scored_in_the_tokens_that_it_has_after_its_prompt(llm):
    tokens = llm.tokenizer.encode("In the beginning God created")
    start = len(llm.tokenizer.encode("In the beginning"))
    assert list(llm.score("In the beginning", " God created").tokens) == tokens[start:]
    with pytest.raises(OptionError, match="empty"):
        llm.score("And", "")
    with pytest.raises(ContextError):
        llm.score("And", [5] * 4097)


def test_a_cleared_bank_is_as_cold_as_a_new_one():
    with mlx_ttd.load("demo", MEMORY, slots=6) as llm:
        counts = []
        for _ in range(2):
            llm.stats(reset=True)
            fresh(llm, ids(40), max_tokens=5, ignore_eos=True)
            counts.append(llm.stats().counters)
            llm.clear_experts()
        first, second = [(c.requests, c.hits, c.misses, c.bytes_read) for c in counts]
        assert first == second


def test_a_longer_prompt_continues_and_reads_only_its_new_tokens(llm):
    first = fresh(llm, ids(40), max_tokens=6, ignore_eos=True)
    before = llm.stats().counters
    longer = ids(40) + list(first.tokens) + ids(10, seed=1)
    second = llm.generate(longer, max_tokens=2, ignore_eos=True)
    counts = llm.stats().counters.since(before)
    assert second.cached_tokens == 45
    # The last answered token was never passed through the model; of the new ones the last is a decode step.
    assert counts.prefill_tokens == 10
    assert counts.decode_steps == 2
    assert counts.hits > 0
    unrelated = llm.generate(ids(12, seed=5), max_tokens=1)
    assert unrelated.cached_tokens == 0


def test_the_same_prompt_again_runs_its_last_token_and_answers_the_same(llm):
    first = fresh(llm, ids(40), max_tokens=1)
    again = llm.generate(ids(40), max_tokens=1)
    assert again.cached_tokens == 39
    assert again.tokens == first.tokens
    assert again.logits_digest == first.logits_digest


def test_saved_state_continues_as_if_never_left(llm, tmp_path):
    fresh(llm, ids(50), max_tokens=4, ignore_eos=True)
    llm.save_state(tmp_path / "state.safetensors")
    tokens = list(live(llm).tokens)
    wanted = llm.generate([*tokens, 5, 6], max_tokens=8, ignore_eos=True)
    fresh(llm, ids(9, seed=3), max_tokens=2)
    assert llm.restore_state(tmp_path / "state.safetensors") == tokens
    found = llm.generate([*tokens, 5, 6], max_tokens=8, ignore_eos=True)
    assert found.cached_tokens == len(tokens)
    assert (found.digest, found.logits_digest) == (wanted.digest, wanted.logits_digest)


def test_a_foreign_or_broken_state_is_refused(llm, tmp_path):
    path = tmp_path / "state.safetensors"
    fresh(llm, ids(5), max_tokens=1)
    llm.save_state(path)
    with mlx_ttd.load("demo", MEMORY, kv_bits=32) as other, pytest.raises(StateError, match="kv_bits"):
        other.restore_state(path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(StateError, match="cut short"):
        llm.restore_state(path)
    with mlx_ttd.load("demo", MEMORY) as empty, pytest.raises(StateError, match="generate"):
        empty.save_state(path)


def test_an_interrupt_in_a_step_leaves_the_next_call_good(llm):
    wanted = fresh(llm, ids(20), max_tokens=5).digest

    def interrupt(tokens, logits):
        raise KeyboardInterrupt

    forget(llm)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(ids(20), max_tokens=5, processors=[interrupt])
    assert llm.last_response is None
    assert llm.generate(ids(20), max_tokens=5).digest == wanted


def interrupted(llm, wanted, **options):
    with pytest.raises(KeyboardInterrupt):
        fresh(llm, "In the beginning", max_tokens=12, **options)
    kept = llm.last_response
    assert (kept.finish_reason, kept.tokens) == ("interrupted", wanted.tokens[:7])
    assert kept.text
    assert wanted.text.startswith(kept.text)


def test_an_interrupt_between_steps_leaves_the_text_and_the_state(llm):
    wanted = fresh(llm, "In the beginning", max_tokens=12)
    prompt = llm.encode("In the beginning")

    def interrupt(tokens, logits):
        if len(tokens) == len(prompt) + 7:
            raise KeyboardInterrupt
        return logits

    interrupted(llm, wanted, processors=[interrupt])
    rest = llm.generate([*prompt, *wanted.tokens[:8]], max_tokens=4)
    assert rest.cached_tokens == len(prompt) + 7
    assert rest.tokens == wanted.tokens[8:]
    assert rest.logits_digest == wanted.logits_digest
    assert llm.last_response == rest


def test_an_interrupt_within_a_step_leaves_the_text(llm, monkeypatch):
    wanted = fresh(llm, "In the beginning", max_tokens=12)
    prompt, layer = llm.encode("In the beginning"), llm.model.layers[2]
    feed_forward = layer._feed_forward

    def interrupt(residual, x, mode):
        # The first layers are ahead of the last.
        if len(live(llm).tokens) == len(prompt) + 6:
            raise KeyboardInterrupt
        return feed_forward(residual, x, mode)

    monkeypatch.setattr(layer, "_feed_forward", interrupt)
    interrupted(llm, wanted)
    monkeypatch.undo()
    again = llm.generate([*prompt, *wanted.tokens[:8]], max_tokens=4)
    assert again.cached_tokens == len(prompt) - 1
    assert again.tokens == wanted.tokens[8:]


def test_an_interrupt_in_the_first_step_costs_that_step(llm, monkeypatch):
    wanted = fresh(llm, ids(40), max_tokens=3)

    def interrupt(*arguments):
        raise KeyboardInterrupt

    forget(llm)
    monkeypatch.setattr(llm.model.layers[2], "_feed_forward", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(ids(40), max_tokens=3)
    monkeypatch.undo()
    again = llm.generate(ids(40), max_tokens=3)
    assert (again.cached_tokens, again.digest) == (39, wanted.digest)


def test_a_chunk_cut_short_behind_its_mark_goes_back_to_it(llm, monkeypatch):
    def fail(*arguments):
        raise RuntimeError("cut short")

    wanted = fresh(llm, ids(40), max_tokens=3)
    forget(llm)
    # By the last experts, every layer's state has passed the mark, and the tokens have not.
    monkeypatch.setattr(llm.model.layers[-1].mlp, "with_experts", fail)
    with pytest.raises(RuntimeError, match="cut short"):
        llm.generate(ids(40), max_tokens=3)
    monkeypatch.undo()
    assert live(llm).tokens == ids(40)[:39]
    again = llm.generate(ids(40), max_tokens=3)
    assert (again.cached_tokens, again.digest, again.logits_digest) == (39, wanted.digest, wanted.logits_digest)


def test_an_interrupt_while_arrays_are_handed_over_is_not_lost():
    rows, ready, caught = np.zeros((1, 64), np.uint16), threading.Event(), 0

    def interrupt_when_ready():
        for _ in range(200):
            ready.wait(10)
            ready.clear()
            time.sleep(0.0005)
            os.kill(os.getpid(), signal.SIGINT)

    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    sender = threading.Thread(target=interrupt_when_ready)
    sender.start()
    for _ in range(200):
        try:
            ready.set()
            deadline = time.monotonic() + 0.2
            while time.monotonic() < deadline:
                kernels.to_device(rows)
        except KeyboardInterrupt:
            caught += 1
    sender.join()
    signal.signal(signal.SIGINT, previous)
    assert caught == 200


def test_forced_tokens_are_checked(llm):
    with pytest.raises(OptionError, match="token 99999999 is outside"):
        llm.generate("And", force=[99_999_999], logprobs=True)


def test_what_score_sets_by_itself_is_refused(llm):
    with pytest.raises(OptionError, match="score sets logprobs by itself"):
        llm.score("And", " God", logprobs=True)
    with pytest.raises(OptionError, match="the continuation is empty"):
        llm.score("And", "")


def test_an_option_out_of_range_leaves_the_live_sequence(llm):
    first = fresh(llm, ids(20), max_tokens=3, ignore_eos=True)
    with pytest.raises(OptionError):
        llm.generate([*ids(20), *first.tokens], temperature=-1.0)
    assert llm.generate([*ids(20), *first.tokens], max_tokens=1).cached_tokens == 22


def test_a_larger_budget_may_buy_a_chunk_and_cost_slots():
    least = mlx_ttd.info("demo")["least_bytes"]
    store, options = open_store(mlx_ttd.demo_path()), make_options({})
    divisions = [divide_budget(store, options, options.context, least + i * 500_000) for i in range(12)]
    grown = next(b for a, b in pairwise(divisions) if b.slots < a.slots)
    before = divisions[divisions.index(grown) - 1]
    with mlx_ttd.load("demo", before.total) as llm:
        llm.set_memory(grown.total)
        assert (llm.provider.slots, llm.division.chunk) == (grown.slots, grown.chunk)
        assert sum(llm.ledger.accounts.values()) <= llm.ledger.total == grown.total
        assert llm.generate("And", max_tokens=2).tokens


def test_an_automatic_budget_counts_what_the_model_holds(monkeypatch):
    with mlx_ttd.load("demo", MEMORY) as llm:
        held = llm.ledger.used
        monkeypatch.setattr(memory, "machine_memory", lambda: (16 * 10**9, 10**9 - held))
        llm.set_memory("auto")
        assert llm.ledger.total == 10**9 - max(memory.LEAST_ROOM, int(10**9 * memory.ROOM_SHARE))


def test_the_budget_changes_without_loading_anew():
    with mlx_ttd.load("demo", MEMORY) as llm:
        wanted = fresh(llm, ids(40), max_tokens=5).digest
        llm.set_memory(mlx_ttd.info("demo")["least_bytes"])
        assert llm.provider.slots == 4
        assert llm.ledger.used <= llm.ledger.total
        assert fresh(llm, ids(40), max_tokens=5).digest == wanted
        with pytest.raises(BudgetError):
            llm.set_memory("1MB")
        llm.set_memory(MEMORY)
        assert llm.provider.slots == 24
        assert fresh(llm, ids(40), max_tokens=5).digest == wanted


def test_closing_gives_memory_back_and_refuses_use():
    import gc

    gc.collect()
    before = mx.get_active_memory()
    llm = mlx_ttd.load("demo", MEMORY)
    llm.generate("And", max_tokens=2)
    assert mx.get_active_memory() > before
    llm.close()
    llm.close()
    gc.collect()
    assert mx.get_active_memory() <= before + 100_000
    with pytest.raises(BusyError, match="closed"):
        llm.generate("And")


def test_a_budget_below_the_least_names_one_that_works():
    with pytest.raises(BudgetError) as caught:
        mlx_ttd.load("demo", 1_000_000)
    least = caught.value.least_bytes
    assert least == mlx_ttd.info("demo")["least_bytes"]
    assert f"{least:,}" in str(caught.value)
    with pytest.raises(BudgetError):
        mlx_ttd.load("demo", least - 1)
    with mlx_ttd.load("demo", least) as llm:
        assert llm.generate("And", max_tokens=2).tokens


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda llm: llm.generate(""), OptionError, "empty"),
        (lambda llm: llm.generate([]), OptionError, "empty"),
        (lambda llm: llm.generate([99_999]), OptionError, "vocabulary"),
        (lambda llm: llm.generate("a", max_tokens=0), OptionError, "max_tokens"),
        (lambda llm: llm.generate("a", temperature=-1), OptionError, "temperature"),
        (lambda llm: llm.generate("a", top_p=2), OptionError, "top_p"),
        (lambda llm: llm.generate("a", warmth=2), OptionError, "warmth"),
        (lambda llm: llm.generate([{"role": "user", "content": "a"}] * 3, stop=""), OptionError, "stop"),
        (lambda llm: mlx_ttd.load("demo", memory="many"), OptionError, "many"),
        (lambda llm: mlx_ttd.load("demo", MEMORY, polcy="lru"), OptionError, "policy"),
        (lambda llm: mlx_ttd.load("demo", MEMORY, policy="best"), OptionError, "fifo"),
        (lambda llm: mlx_ttd.load("demo", MEMORY, depth=0), OptionError, "depth"),
        (lambda llm: mlx_ttd.load("demo", MEMORY, depth="8"), OptionError, "int"),
        (lambda llm: mlx_ttd.load("nowhere", MEMORY), StoreError, "nowhere"),
    ],
)
def test_bad_input_gets_one_sentence(llm, call, error, words):
    with pytest.raises(error, match=words) as caught:
        call(llm)
    assert "\n" not in str(caught.value)


def test_environment_variables_mirror_options(monkeypatch):
    monkeypatch.setenv("MLX_TTD_POLICY", "lru")
    monkeypatch.setenv("MLX_TTD_MEMORY", MEMORY)
    with mlx_ttd.load("demo") as llm:
        assert llm.options.policy == "lru"
        assert llm.division.total == 300_000_000
    with mlx_ttd.load("demo", policy="fifo") as llm:
        assert llm.options.policy == "fifo"
    monkeypatch.setenv("MLX_TTD_POLCY", "lru")
    with pytest.raises(OptionError, match="MLX_TTD_POLCY"):
        mlx_ttd.load("demo")


def test_a_dense_model_that_does_not_fit_is_refused_with_the_reason(tmp_path):
    import checkpoints

    from mlx_ttd.store import convert

    store = convert(checkpoints.tiny(tmp_path / "hf", checkpoints.DENSE), tmp_path / "dense.ttd")
    with pytest.raises(BudgetError, match="every weight for each token"):
        mlx_ttd.load(store, "64MB")
    with mlx_ttd.load(store, MEMORY) as llm:
        assert llm.generate([1, 2, 3], max_tokens=3).tokens
