"""The tightest of the machine and the control groups decides."""

from __future__ import annotations

from pathlib import Path

import pytest

from sensorium.utils.system_memory import get_free_system_bytes

KIB = 1024


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    folder = tmp_path / "proc"
    (folder / "self").mkdir(parents=True)
    (folder / "meminfo").write_text("MemTotal:  900 kB\nMemAvailable:  500 kB\nHugePages: 0\n")
    return folder


def write_group(
    folder: Path, *, limit: object, use: int, file: int, names: tuple[str, str, str]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{use}\n")
    (folder / "memory.stat").write_text(f"anon 7\n{names[2]} {file}\n")


V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "active_file")


def test_without_groups_it_is_what_the_machine_has(proc: Path, tmp_path: Path) -> None:
    assert get_free_system_bytes(proc, tmp_path / "cgroup") == 500 * KIB
    (proc / "self" / "cgroup").write_text("0::/\n")
    assert get_free_system_bytes(proc, tmp_path / "cgroup") == 500 * KIB


def test_a_tighter_group_decides_and_its_page_cache_counts_as_free(
    proc: Path, tmp_path: Path
) -> None:
    root = tmp_path / "cgroup"
    (proc / "self" / "cgroup").write_text("0::/box/inner\n")
    write_group(root / "box", limit=300, use=150, file=50, names=V2)
    write_group(root / "box/inner", limit="max", use=150, file=0, names=V2)
    assert get_free_system_bytes(proc, root) == 200
    write_group(root / "box/inner", limit=100, use=150, file=0, names=V2)
    assert get_free_system_bytes(proc, root) == 0


def test_groups_of_the_first_version_are_found(proc: Path, tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    (proc / "self" / "cgroup").write_text("9:name=systemd:/\n4:memory,hugetlb:/box\n0::/\n")
    write_group(root / "memory/box", limit=1000, use=400, file=100, names=V1)
    write_group(root / "memory", limit=2**63, use=400, file=100, names=V1)
    assert get_free_system_bytes(proc, root) == 700


def test_a_group_that_a_container_does_not_see_is_the_root(proc: Path, tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    (proc / "self" / "cgroup").write_text("4:memory:/docker/0123\n")
    write_group(root / "memory", limit=1000, use=400, file=0, names=V1)
    assert get_free_system_bytes(proc, root) == 600


def test_this_machine_has_something_free() -> None:
    assert get_free_system_bytes() > 0
