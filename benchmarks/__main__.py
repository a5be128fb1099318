"""A full run: rounds of every benchmark, recorded in RESULTS.json and quoted in README.md.

    python -m benchmarks [--groups NAME ...] [--rounds 3] [--minutes 9] [--work DIR] [--scratch]
    python -m benchmarks --list            what there is: groups, minutes, disk
    python -m benchmarks --quote           mark older GPU entries and write the medians into README.md again

Exit status 3: the minutes ended, and the same command goes on; 1: something failed; 0: all is done. It refuses to run
where tracked files differ from the commit, unless --scratch, which records nothing. Stores are written to --work,
which must not lie in memory, and removed at the end. Groups that cannot be had here are left out, and named.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from benchmarks.command import require_native
from benchmarks.commits import ROOT
from benchmarks.full_run import DONE, FullRun
from benchmarks.jobs import GROUPS, JOBS, ON_REQUEST, Job
from benchmarks.quotes import requoted
from benchmarks.record import read, record

README = ROOT / "README.md"


def show(rounds: int) -> None:
    """Print each group with its jobs, the minutes of its rounds and the disk it needs."""
    for group, missing in GROUPS.items():
        jobs = [job for job in JOBS if job.group == group]
        files = {file for job in jobs for file in job.files}
        minutes = rounds * sum(job.minutes for job in jobs) + sum(file.minutes for file in files)
        disk = sum(file.disk for file in files) / 1e9
        note = f"; not here: {reason}" if (reason := missing()) else "; on request" if group in ON_REQUEST else ""
        print(f"{group}: {minutes:.0f} minutes for {rounds} rounds, {disk:.0f} GB of disk{note}")
        for job in jobs:
            print(f"  {job.name:<28} {job.minutes:>4.1f} minutes a round   {job.command}")


def chosen(groups: list[str] | None) -> list[Job]:
    """Jobs of the groups asked for, or of all that can be had. SystemExit for one that cannot."""
    wanted = []
    for group, missing in GROUPS.items():
        if groups is not None and group not in groups:
            continue
        reason = missing()
        if reason and groups is not None:
            raise SystemExit(f"the group {group} cannot be run here: {reason}.")
        if reason or (groups is None and group in ON_REQUEST):
            print(f"left out: {group}, {reason or 'which runs when --groups names it'}.")
        else:
            wanted.append(group)
    return [job for job in JOBS if job.group in wanted]


def quote() -> None:
    """Mark the entries of GPUs that are older, and bring README.md's figures to those of RESULTS.json."""
    README.write_text(requoted(README.read_text(), record({})))


def stop_on_signals() -> None:
    """Let SIGTERM end this process as Ctrl-C does: with what it runs."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", nargs="+", choices=tuple(GROUPS), metavar="NAME", help=", ".join(GROUPS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, help="stop between commands so that this is kept; left out: no limit")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "benchmarks", help="where files and state lie")
    parser.add_argument("--scratch", action="store_true", help="record nothing, and run in a tree that is not clean")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--quote", action="store_true")
    arguments = parser.parse_args()
    if arguments.list:
        show(arguments.rounds)
        return DONE
    if arguments.quote:
        quote()
        return DONE
    if arguments.rounds < 1 or (arguments.rounds < 3 and not arguments.scratch):
        parser.error("a run that is recorded has at least 3 rounds; give --scratch to look at fewer.")
    require_native()
    stop_on_signals()
    run = FullRun(
        chosen(arguments.groups), arguments.work.resolve(), arguments.rounds, arguments.minutes, arguments.scratch
    )
    status = run.go()
    if run.state["recorded"] and not arguments.scratch:
        README.write_text(requoted(README.read_text(), read()))
    return status


if __name__ == "__main__":
    sys.exit(main())
