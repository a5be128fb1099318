"""Loading: by hub id, beside another model, in place of the one a notebook's cell made; progress, backends, options."""

from __future__ import annotations

import io
import re
import sys
from dataclasses import fields
from types import SimpleNamespace

import pytest
from test_hub import REPO, hub  # noqa: F401

import mlx_ttd
from mlx_ttd import kernels, progress_line
from mlx_ttd.errors import BudgetError, BusyError, KernelError, OptionError, StoreError
from mlx_ttd.kernels import native_status
from mlx_ttd.options import Options
from mlx_ttd.progress_line import ProgressLine
from mlx_ttd.store import hub_size

MEMORY = "300MB"


@pytest.fixture
def stores(tmp_path):
    """A directory of stores by hub id that holds the demo model as bible/demo."""
    (tmp_path / "bible").mkdir()
    (tmp_path / "bible/demo.ttd").symlink_to(mlx_ttd.demo_path())
    return tmp_path


@pytest.fixture
def terminal(monkeypatch):
    """Standard error as a terminal that keeps what it was sent; lines appear at once."""
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.setattr(progress_line, "sys", SimpleNamespace(stderr=screen, modules=sys.modules))
    monkeypatch.setattr(progress_line, "DELAY", 0.0)
    monkeypatch.setattr(progress_line, "INTERVAL", 0.0)
    return screen


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*arguments, **keywords):
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", refuse)


def test_a_hub_id_loads_the_store_that_is_there(stores, monkeypatch):
    with mlx_ttd.load("bible/demo", MEMORY, stores=str(stores)) as llm:
        assert llm.store.path == stores / "bible/demo.ttd"
    monkeypatch.setenv("MLX_TTD_STORES", str(stores))
    assert mlx_ttd.info("bible/demo")["experts"] == 24


def test_a_hub_id_without_a_store_names_the_command(stores, no_network):
    with pytest.raises(StoreError) as caught:
        mlx_ttd.load("bible/other", MEMORY, stores=str(stores))
    assert f"`mlx-ttd convert bible/other {stores}/bible/other.ttd`" in str(caught.value)
    assert " GB" not in str(caught.value)


def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(monkeypatch):
    def refuse(*arguments, **keywords):
        raise AssertionError("asked the hub")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", refuse)
    with pytest.raises(StoreError, match=r"no manifest\.json"):
        mlx_ttd.load("models/other.ttd", MEMORY)


def test_the_command_works_and_its_cost_is_the_download(hub, tmp_path):  # noqa: F811
    with pytest.raises(StoreError, match=r"downloads 0\.\d\d GB") as caught:
        mlx_ttd.load(REPO, MEMORY, stores=str(tmp_path))
    wanted = sum(len(data) for name, data in hub.files.items() if name.endswith(".safetensors"))
    assert hub_size.hub_bytes(REPO) == wanted
    source, destination = re.search(r"`mlx-ttd convert (\S+) (\S+)`", str(caught.value)).groups()
    mlx_ttd.convert(source, destination)
    with mlx_ttd.load(REPO, MEMORY, stores=str(tmp_path)) as llm:
        assert llm.store.spec.is_moe


def test_loading_again_replaces_where_asked():
    first = mlx_ttd.load("demo", MEMORY, slots=6)
    other = mlx_ttd.load("demo", MEMORY, slots=6)
    assert not first.closed
    again = mlx_ttd.load("demo", MEMORY, slots=6, replace=True)
    assert first.closed
    assert other.closed
    assert "closed" in repr(first)
    with pytest.raises(BusyError, match="closed"):
        first.generate("And")
    assert again.generate("And", max_tokens=2).tokens
    again.close()


def test_a_bad_option_closes_nothing():
    with mlx_ttd.load("demo", MEMORY, slots=6) as llm:
        with pytest.raises(OptionError):
            mlx_ttd.load("demo", MEMORY, policy="best", replace=True)
        assert not llm.closed


def test_in_ipython_a_load_replaces_unless_told_not_to(monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace()))
    first = mlx_ttd.load("demo", MEMORY, slots=6)
    with mlx_ttd.load("demo", MEMORY, slots=6) as second:
        assert first.closed
        with mlx_ttd.load("demo", MEMORY, slots=6, replace=False):
            assert not second.closed
        mlx_ttd.compare("demo", {"a": {}, "b": {"policy": "lru"}}, [1, 2, 3], 2, 1, memory=MEMORY, slots=6)
        assert not second.closed


def test_two_models_under_one_budget():
    with mlx_ttd.load("demo", MEMORY, slots=6) as first:
        alone = first.generate("In the beginning", max_tokens=6).digest
        used = first.ledger.used
        with mlx_ttd.load("demo", share=first, slots=5) as second:
            assert second.ledger.total == first.ledger.total == 300_000_000
            assert second.ledger.used == first.ledger.used > used
            assert second.provider.pool.threads is first.provider.pool.threads
            assert second.generate("In the beginning", max_tokens=6).digest == alone
            assert second.stats().counters.bytes_read > 0
            streams = [llm.stream("And", max_tokens=8) for llm in (first, second)]
            assert all(a.tokens == b.tokens for a, b in zip(*streams, strict=True))
        assert first.ledger.used == used
        assert first.generate("In the beginning", max_tokens=6).digest == alone


def test_a_model_that_does_not_fit_beside_another_is_refused():
    least = mlx_ttd.info("demo")["least_bytes"]
    with mlx_ttd.load("demo", least + 1_000_000, slots=4) as first:
        used = first.ledger.used
        with pytest.raises(BudgetError, match="leaves") as caught:
            mlx_ttd.load("demo", share=first)
        assert f"{least:,}" in str(caught.value)
        assert first.ledger.used == used
        with pytest.raises(OptionError, match="exclude"):
            mlx_ttd.load("demo", MEMORY, share=first)


def test_the_scores_of_a_prompts_attention_are_budgeted_where_no_kernel_does_without_them(monkeypatch):
    def least(kind):
        with kernels.forced(kind):
            return mlx_ttd.info("demo")["least_bytes"]

    assert least("reference") > least("gpu") == least("native")
    monkeypatch.setattr(kernels, "ATTENTION_WIDTHS", ())
    assert least("reference") == least("gpu") > least("native")


def test_a_shared_budget_changes_for_all():
    with mlx_ttd.load("demo", MEMORY, slots=6) as first, mlx_ttd.load("demo", share=first, slots=6) as second:
        second.set_memory("250MB")
        assert first.ledger.total == 250_000_000
        assert first.ledger.used <= first.ledger.total
        with pytest.raises(BudgetError):
            second.set_memory("100MB")
        assert first.ledger.used <= first.ledger.total == 250_000_000


def test_progress_shows_on_a_terminal_and_goes_away(terminal):
    with mlx_ttd.load("demo", MEMORY, slots=6) as llm:
        assert "loading demo: ███" in terminal.getvalue()
        llm.generate("In the beginning God created", max_tokens=1)
    assert "reading the prompt: ████" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r")


def test_no_progress_where_it_is_not_wanted_or_seen(terminal, monkeypatch):
    with mlx_ttd.load("demo", MEMORY, slots=6, progress=False) as llm:
        llm.generate("In the beginning", max_tokens=1)
    terminal.isatty = lambda: False
    with mlx_ttd.load("demo", MEMORY, slots=6) as llm:
        llm.generate("In the beginning", max_tokens=1)
    assert terminal.getvalue() == ""
    monkeypatch.setitem(
        sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel="a Jupyter kernel"))
    )
    assert ProgressLine("working").visible


@pytest.mark.parametrize("slots", [6, 24])
def test_warming_up_fills_slots_and_changes_nothing_else(slots):
    with mlx_ttd.load("demo", MEMORY, slots=slots) as llm:
        wanted = llm.generate("In the beginning", max_tokens=8)
    with mlx_ttd.load("demo", MEMORY, slots=slots, warm_up=True) as llm:
        before = llm.stats().counters
        assert (before.requests, before.decode_steps, before.prefill_tokens, before.bytes_read) == (0, 0, 0, 0)
        assert before.resident_bytes > 0
        found = llm.generate("In the beginning", max_tokens=8)
        counts = llm.stats().counters
        assert (found.digest, found.logits_digest) == (wanted.digest, wanted.logits_digest)
        assert counts.misses == 0 if slots == 24 else counts.hits > 0
    with mlx_ttd.load("demo", MEMORY, context=1, warm_up=True) as llm:
        assert llm.generate([1], max_tokens=1).tokens


def test_compiling_is_told_apart_and_absent_where_there_was_none(monkeypatch):
    monkeypatch.setattr(kernels.first_use, "_seconds", {})
    with mlx_ttd.load("demo", MEMORY, slots=6) as llm:
        llm.generate("And", max_tokens=1)
        assert llm.stats().compile_seconds is None
        assert "compiling" not in str(llm.stats())
        with kernels.first_use.first_use("a kernel"):
            pass
        assert llm.stats().compile_seconds > 0
        assert "compiling" in str(llm.stats())


def test_representations_can_be_read():
    with mlx_ttd.load("demo", MEMORY, slots=6) as llm:
        llm.generate("And", max_tokens=3)
        assert "6 of 24 experts" in repr(llm)
        assert "6 of 24 experts" in llm._repr_html_()
        stats = llm.stats()
        assert stats.first_token_seconds > 0
        assert stats.load_seconds > 0
        assert "first token" in stats._repr_html_()
        assert "experts read" in str(stats)
        assert stats.to_json()["schema"] == 1
        assert stats.options is llm.options


def test_a_backend_that_cannot_be_had_is_an_error(monkeypatch):
    if mlx_ttd.kernels.device_kind() == "cpu":
        with pytest.raises(KernelError, match="backend='gpu' cannot be had"):
            mlx_ttd.load("demo", MEMORY, backend="gpu")
    monkeypatch.setattr(mlx_ttd.kernels, "native_status", lambda: "none: mlx_ttd was installed without its native part")
    with pytest.raises(KernelError, match="without its native part"):
        mlx_ttd.load("demo", MEMORY, backend="native")
    with mlx_ttd.load("demo", MEMORY) as llm:
        assert llm.generate("And", max_tokens=2).tokens


def test_a_failed_load_leaves_the_backend_as_it_was():
    with pytest.raises(BudgetError):
        mlx_ttd.load("demo", "1MB", backend="reference")
    assert kernels.forced_kind() is None


def test_debugging_kernels_is_no_option(monkeypatch):
    monkeypatch.setenv("MLX_TTD_DEBUG", "1")
    with mlx_ttd.load("demo", MEMORY) as llm:
        assert llm.generate("And", max_tokens=1).tokens


def test_a_forced_backend_runs_what_has_it():
    wanted = "reference" if native_status().startswith("none") else "native"
    try:
        with mlx_ttd.load("demo", MEMORY, backend=wanted) as llm:
            llm.generate("And", max_tokens=2)
            assert {llm.stats().kernels[op] for op in ("linear", "expert_ffn", "router")} == {wanted}
    finally:
        mlx_ttd.kernels.set_backend(None)


def test_options_describe_themselves():
    for field in fields(Options):
        assert f"{field.name} = {field.default!r}: {field.metadata['doc']}" in Options.__doc__
