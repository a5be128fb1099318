"""What the control groups of this process leave it of memory (Linux, versions 1 and 2)."""

from __future__ import annotations

from pathlib import Path

ROOT, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
UNLIMITED = 1 << 60
# Version: limit, use (page cache included), and where the page cache that would make room stands in memory.stat.
FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
    2: ("memory.max", "memory.current", ("inactive_file", "active_file")),
}


def _memberships(text: str, root: Path) -> list[tuple[int, Path, Path]]:
    """(version, hierarchy, own group) of the memory controllers named in /proc/self/cgroup."""
    found = []
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found.append((2, root, root / path.lstrip("/")))
        elif "memory" in controllers.split(","):
            found.append((1, root / "memory", root / "memory" / path.lstrip("/")))
    return found


def _group(version: int, folder: Path) -> tuple[int, int] | None:
    limit_name, use_name, reclaimable = FILES[version]
    try:
        limit = (folder / limit_name).read_text().strip()
        if limit == "max" or int(limit) >= UNLIMITED:
            return None
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        used = int((folder / use_name).read_text()) - sum(int(stat[name]) for name in reclaimable)
    except (OSError, ValueError, KeyError):
        return None
    return int(limit), max(0, int(limit) - used)


def control_group_memory(root: Path = ROOT, membership: Path = MEMBERSHIP) -> tuple[int, int] | None:
    """(limit, bytes left under it with page cache dropped), the least of each over all groups; None without a limit."""
    try:
        memberships = _memberships(membership.read_text(), root)
    except (OSError, ValueError):
        return None
    found = [
        limits
        for version, hierarchy, own in memberships
        for folder in (own, *own.parents)
        if folder.is_relative_to(hierarchy) and (limits := _group(version, folder)) is not None
    ]
    return (min(limit for limit, _ in found), min(left for _, left in found)) if found else None
