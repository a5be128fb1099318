"""Which code made a figure: the checkout's commit, whether its tree is clean, and what has changed since a commit."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
# What a benchmark on a CPU runs, and what one on a GPU does; directories that move are renamed here and nowhere else.
CODE = ("mlx_ttd", "csrc", "benchmarks/*.py")
GPU_CODE = ("csrc/kernels", "mlx_ttd/kernels", "mlx_ttd/models", "mlx_ttd/layers")
# The full run itself writes these.
WRITTEN = (":!README.md", ":!benchmarks/RESULTS.json")


def git(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)


def head(root: Path = ROOT) -> str | None:
    """The checkout's commit, abbreviated; None outside a checkout."""
    try:
        found = git(root, "rev-parse", "--short", "HEAD")
    except OSError:
        return None
    return found.stdout.strip() if found.returncode == 0 else None


def commit(root: Path = ROOT) -> str | None:
    """As `head`, with + when the code differs from it."""
    found = head(root)
    return found + ("+" if changed_since(found, CODE, root) else "") if found else None


def unclean(root: Path = ROOT) -> list[str]:
    """Tracked files that differ from the commit, and code that is not tracked; not what the full run writes."""
    tracked = git(root, "diff", "--name-only", "HEAD", "--", ".", *WRITTEN).stdout.splitlines()
    return tracked + git(root, "ls-files", "--others", "--exclude-standard", "--", *CODE).stdout.splitlines()


def changed_since(commit: str | None, paths: Sequence[str], root: Path = ROOT) -> bool | None:
    """Whether `paths` differ from what they were at `commit` (true for one with + or None); None: git knows not."""
    if commit is None or commit.endswith("+"):
        return True
    try:
        found = git(root, "diff", "--quiet", commit, "--", *paths).returncode
    except OSError:
        return None
    return {0: False, 1: True}.get(found)
