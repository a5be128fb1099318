"""A test may be skipped only for a reason that allowed_skips.txt lists; any other skip fails the run."""

from __future__ import annotations

import gc
from fnmatch import fnmatch
from pathlib import Path

import hypothesis
import mlx.core as mx
import pytest

hypothesis.settings.register_profile("busy machine", deadline=None)
hypothesis.settings.load_profile("busy machine")
SKIPS = pytest.StashKey[list[str]]()
LINES = (Path(__file__).parent / "allowed_skips.txt").read_text().splitlines()
ALLOWED = [line for line in LINES if line and not line.startswith("#")]


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SKIPS] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    ran = sum(len(terminalreporter.stats.get(outcome, [])) for outcome in ("passed", "failed", "xfailed", "xpassed"))
    skipped = len(terminalreporter.stats.get("skipped", []))
    terminalreporter.write_line(f"{ran} tests ran; {skipped} were skipped, {len(config.stash[SKIPS])} without leave")
    for skip in config.stash[SKIPS]:
        terminalreporter.write_line(f"not listed in tests/allowed_skips.txt: {skip}", red=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    report = yield
    note_skip(item.config, report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector):
    report = yield
    note_skip(collector.config, report)
    return report


def note_skip(config: pytest.Config, report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        assert isinstance(report.longrepr, tuple)
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if not any(fnmatch(reason, pattern) for pattern in ALLOWED):
            config.stash[SKIPS].append(f"{report.nodeid}: {reason}")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus == pytest.ExitCode.OK and session.config.stash[SKIPS]:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="module")
def nothing_left_by_others():
    """Models that other tests left in cycles evaluate arrays when they are collected, which would count as ours."""
    gc.collect()
    # MLX gives a freed buffer to an array of up to two pages less, and counts all of it.
    mx.clear_cache()
