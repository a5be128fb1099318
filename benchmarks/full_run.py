"""Rounds of benchmarks, each a process of its own, in parts of minutes: what is done is kept beside the files.

A round that a signal, its time limit or the end of the minutes cuts short leaves nothing; it is run again. Files are
written before the first job that needs them and removed after the last.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.commits import CODE, ROOT, changed_since, head, unclean
from benchmarks.jobs import File, Job
from benchmarks.record import RESULTS, Entry, entry_of, record, summary
from mlx_ttd.options import PREFIX

LIMIT, GRACE, SPARE_DISK = 6, 30.0, 10**9
DONE, FAILED, MORE = 0, 1, 3


class Cut(Exception):
    """The minutes ended within a command."""


def begin(work: Path, scratch: bool, root: Path = ROOT) -> dict[str, Any]:
    """The state of the run in `work`, begun now or before. SystemExit for an unclean tree or one of other code."""
    path, commit = work / "state.json", head(root)
    if not scratch and commit is None:
        raise SystemExit("figures are kept with the commit that made them, and this is no git checkout; use --scratch.")
    if not scratch and (changed := unclean(root)):
        raise SystemExit(
            f"{', '.join(changed[:3])} {'differ' if len(changed) > 1 else 'differs'} from the commit, so no commit "
            "made these figures: commit first, or look at figures without keeping them with --scratch."
        )
    if not path.exists():
        return {"commit": commit, "scratch": scratch, "rounds": {}, "seconds": {}, "recorded": []}
    state = json.loads(path.read_text())
    if state["scratch"] != scratch:
        raise SystemExit(f"the run in {work} was begun with{'' if state['scratch'] else 'out'} --scratch; "
                         "go on so, or give another --work.")  # fmt: skip
    if not scratch and changed_since(state["commit"], CODE, root) is not False:
        raise SystemExit(f"the run in {work} was begun with the code of {state['commit']}, which has changed; "
                         "go back to it, or give another --work.")  # fmt: skip
    return state


def round_of(found: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a benchmark's --json. KeyError or ValueError where it holds no figures."""
    for value in found["results"].values():
        summary([value])
    return {"machine": found["machine"], "noisy": found.get("noisy", False), "results": found["results"]}


class FullRun:
    """`rounds` rounds of `jobs` in the directory `work`; `minutes` of them in this process."""

    def __init__(self, jobs: Sequence[Job], work: Path, rounds: int, minutes: float | None, scratch: bool = False):
        self.state = begin(work, scratch)
        # The log and the figures of each command, of the last time that it ran.
        self.out = work / "out"
        self.out.mkdir(parents=True, exist_ok=True)
        self.jobs, self.work, self.rounds, self.scratch = jobs, work, rounds, scratch
        self.ends = time.monotonic() + minutes * 60 if minutes else None
        self.results: Path = RESULTS
        self.ran = 0

    def done(self, job: Job) -> int:
        return len(self.state["rounds"].get(job.name, []))

    def pending(self) -> list[Job]:
        """Jobs in their order: group after group, and within a group round after round."""
        groups = list(dict.fromkeys(job.group for job in self.jobs))
        left = [job for job in self.jobs if self.done(job) < self.rounds]
        return sorted(left, key=lambda job: (groups.index(job.group), self.done(job)))

    def save(self) -> None:
        draft = self.work / "state.draft"
        draft.write_text(json.dumps(self.state) + "\n")
        os.replace(draft, self.work / "state.json")

    def enough(self, seconds: float) -> bool:
        """Whether there is time for a command of `seconds`; the first may try whatever it takes."""
        return self.ends is None or self.ran == 0 or time.monotonic() + seconds < self.ends

    def run(self, label: str, module: str, arguments: Sequence[str], minutes: float) -> float:
        """Seconds of one command. RuntimeError if it fails or takes LIMIT times its minutes, Cut at the run's end."""
        limit, first = max(60.0, LIMIT * minutes * 60), self.ran == 0
        if cut := self.ends is not None and self.ends - time.monotonic() + GRACE < limit:
            assert self.ends is not None
            limit = max(GRACE, self.ends - time.monotonic() + GRACE)
        self.ran += 1
        log, began, temporary = self.out / f"{label}.log", time.monotonic(), self.work / "temporary"
        temporary.mkdir(exist_ok=True)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
        environment["TMPDIR"] = str(temporary)
        with log.open("w") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL,
                stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                status = process.wait(limit)
            except subprocess.TimeoutExpired:
                if cut and not first:
                    raise Cut from None
                raise RuntimeError(f"took more than {limit:.0f} s; see {log}") from None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                shutil.rmtree(temporary, ignore_errors=True)
        if status:
            last = " / ".join(log.read_text(errors="replace").strip().splitlines()[-2:])
            raise RuntimeError(f"ended with {status}: {last}; see {log}")
        return time.monotonic() - began

    def path(self, file: File) -> Path:
        return self.work / file.name

    def make(self, file: File) -> None:
        """Write `file` under another name until it is whole."""
        free = shutil.disk_usage(self.work).free
        if free < file.disk + SPARE_DISK:
            raise RuntimeError(
                f"{file.name} needs {file.disk / 1e9:.0f} GB in {self.work} and {free / 1e9:.0f} GB are free; "
                "give another --work"
            )
        draft = self.work / f"{file.name}.draft"
        arguments = [argument.format(file=draft) for argument in file.arguments]
        seconds = self.run(file.name, file.module, arguments, file.minutes)
        draft.rename(self.path(file))
        print(f"{file.name}: written in {seconds:.0f} s", flush=True)

    def remove_files(self, needed: set[str]) -> None:
        """Remove every file of these jobs but the `needed` ones, and what an interrupted writing left."""
        for name in {file.name for job in self.jobs for file in job.files} - needed:
            for path in [self.work / name, *self.work.glob(f"{name}.draft*")]:
                shutil.rmtree(path, ignore_errors=True)

    def round(self, job: Job) -> None:
        """One round of `job`, its files first. RuntimeError if it fails, Cut where the minutes end."""
        for file in job.files:
            if not self.path(file).exists():
                if not self.enough(file.minutes * 60):
                    raise Cut
                self.make(file)
        expected = self.state["seconds"].get(job.name, job.minutes * 60)
        if not self.enough(expected):
            raise Cut
        out = self.out / f"{job.name}.json"
        out.unlink(missing_ok=True)
        paths = {file.name: self.path(file) for file in job.files}
        arguments = [argument.format_map(paths) for argument in job.arguments]
        seconds = self.run(job.name, job.module, [*arguments, "--json", str(out)], job.minutes)
        try:
            kept = round_of(json.loads(out.read_text()))
        except (OSError, KeyError, ValueError) as error:
            raise RuntimeError(f"left no figures in {out}: {error}") from error
        self.state["rounds"].setdefault(job.name, []).append(kept)
        self.state["seconds"][job.name] = seconds
        self.save()
        print(f"{job.name}: round {self.done(job)} of {self.rounds} in {seconds:.0f} s", flush=True)

    def entry(self, benchmark: str) -> Entry:
        """Of the rounds of all jobs of a benchmark."""
        parts = [job for job in self.jobs if job.benchmark == benchmark]
        rounds = [round_ for job in parts for round_ in self.state["rounds"][job.name]]
        return entry_of(rounds, self.state["commit"], [job.command for job in parts])

    def record_finished(self) -> None:
        """Record each benchmark whose rounds are all there."""
        unfinished = {job.benchmark for job in self.pending()}
        for benchmark in dict.fromkeys(job.benchmark for job in self.jobs):
            if benchmark not in unfinished and benchmark not in self.state["recorded"]:
                try:
                    entry = self.entry(benchmark)
                except ValueError as error:
                    raise SystemExit(f"{benchmark}: {error} Remove {self.work / 'state.json'} for that.") from error
                for name, figure in entry["results"].items():
                    values = f"{figure['median']:.4g} ({figure['least']:.4g} to {figure['greatest']:.4g})"
                    print(f"  {benchmark}/{name:<40} {values}")
                if not self.scratch:
                    record({benchmark: entry}, self.results)
                self.state["recorded"].append(benchmark)
                self.save()

    def go(self) -> int:
        """Run until all is done (DONE), the minutes end (MORE) or what is left has failed (FAILED)."""
        failed: set[str] = set()
        try:
            self.record_finished()
            while left := [job for job in self.pending() if job.name not in failed]:
                self.remove_files({file.name for job in self.pending() for file in job.files})
                try:
                    self.round(left[0])
                except RuntimeError as error:
                    failed.add(left[0].name)
                    print(f"{left[0].name}: {error}", flush=True)
                self.record_finished()
        except Cut:
            rounds = sum(self.rounds - self.done(job) for job in self.pending())
            print(f"the time is up with {rounds} rounds to go; run the same command again.", flush=True)
            return FAILED if failed else MORE
        if failed:
            print(f"failed: {', '.join(sorted(failed))}; the same command tries again.", flush=True)
            return FAILED
        self.remove_files(set())
        shutil.rmtree(self.out)
        (self.work / "state.json").unlink(missing_ok=True)
        return DONE
