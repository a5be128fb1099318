"""What this machine has to give: control groups of both versions, page cache that makes room, and `memory="auto"`."""

from __future__ import annotations

import pytest

from mlx_ttd.streaming import auto_budget, memory
from mlx_ttd.streaming.control_group import control_group_memory

GB = 10**9
VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                                1000.
Pages active:                            500000.
Pages inactive:                          400000.
Pages speculative:                          300.
Pages purgeable:                             20.
"Translation faults":                1234567890.
File-backed pages:                        60000.
Anonymous pages:                         800000.
"""


def group(folder, version, limit, used, cached):
    """The files of one control group, its page cache part of `used`."""
    folder.mkdir(parents=True, exist_ok=True)
    names, prefix = (("memory.max", "memory.current"), "") if version == 2 else (
        ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_"
    )  # fmt: skip
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    halves = f"{prefix}inactive_file {cached // 2}\n{prefix}active_file {cached - cached // 2}\n"
    (folder / "memory.stat").write_text(f"anon 5\n{halves}inactive_anon 7\n")


def member(tmp_path, text):
    (tmp_path / "membership").write_text(text)
    return control_group_memory(tmp_path / "fs", tmp_path / "membership")


def test_page_cache_of_a_group_is_room(tmp_path):
    group(tmp_path / "fs" / "a" / "b", 2, 4 * GB, int(3.5 * GB), 3 * GB)
    assert member(tmp_path, "0::/a/b\n") == (4 * GB, int(3.5 * GB))


def test_the_tightest_group_above_counts(tmp_path):
    group(tmp_path / "fs" / "a" / "b", 2, "max", GB, 0)
    group(tmp_path / "fs" / "a", 2, 2 * GB, GB, 0)
    group(tmp_path / "fs", 2, 8 * GB, 8 * GB, GB // 2)
    assert member(tmp_path, "0::/a/b\n") == (2 * GB, GB // 2)


def test_groups_of_version_1_count_and_other_controllers_do_not(tmp_path):
    group(tmp_path / "fs" / "memory" / "job", 1, 3 * GB, 2 * GB, GB)
    group(tmp_path / "fs" / "memory", 1, 9223372036854771712, 20 * GB, 0)
    group(tmp_path / "fs" / "cpu" / "job", 1, GB, GB, 0)
    assert member(tmp_path, "4:memory:/job\n3:cpu:/job\n0::/\n") == (3 * GB, 2 * GB)


@pytest.mark.parametrize("text", ["", "0::/\n", "4:memory:/gone\n", "nonsense\n"])
def test_no_limit_is_none(tmp_path, text):
    assert member(tmp_path, text) is None


def test_a_mac_gives_what_needs_no_compressing():
    assert memory.mac_reclaimable(VM_STAT) == 16384 * (1000 + 60000 + 20)


@pytest.mark.parametrize(
    ("total", "reclaimable", "budget"),
    [(24 * GB, 20 * GB, 12 * GB), (24 * GB, 8 * GB, 7_200_000_000), (8 * GB, 2 * GB, 1_700_000_000), (8 * GB, 0, 1)],
)
def test_auto_takes_half_at_most_and_leaves_room(monkeypatch, total, reclaimable, budget):
    monkeypatch.setattr(memory, "machine_memory", lambda: (total, reclaimable))
    monkeypatch.setattr("mlx.core.metal.is_available", lambda: False)
    assert auto_budget() == budget
