"""Finds out how much memory this process can still get without being killed for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class _Version(NamedTuple):
    """The names of the files and folders of one version of Linux control groups."""

    folder: str  # below the mount; also the name of the controller
    limit: str
    use: str
    given_back: tuple[str, ...]  # the parts of the use that the system can take back (page cache)


_VERSIONS = (
    _Version("", "memory.max", "memory.current", ("inactive_file", "active_file")),
    _Version(
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
)


def get_free_system_bytes(
    proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> int:
    """Return how many bytes of memory this process can still get.

    It is the memory that the machine has available, or less if a control group that contains the
    process has less left below its limit.
    """
    return min([_get_available_bytes(proc), *_get_cgroup_rooms(proc, cgroups)])


def _get_available_bytes(proc: Path) -> int:
    meminfo = proc / "meminfo"
    if not meminfo.exists():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
    # Includes what the page cache would give back.
    return int(fields["MemAvailable"].split()[0]) * 1024


def _get_cgroup_rooms(proc: Path, cgroups: Path) -> Iterator[int]:
    membership = proc / "self" / "cgroup"
    if not membership.exists():
        return
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for version in _VERSIONS:
            if version.folder in controllers.split(","):
                yield from _get_rooms_upwards(cgroups / version.folder, path.strip("/"), version)


def _get_rooms_upwards(root: Path, path: str, version: _Version) -> Iterator[int]:
    """Yield how many bytes are left in a control group and in the groups above it, if limited.

    In a container the group itself may be invisible; then only the groups above it count.
    """
    group = root / path
    for folder in (group, *group.parents):
        if (folder / version.limit).is_file():
            limit = (folder / version.limit).read_text().strip()
            if limit != "max":
                yield max(0, int(limit) - _get_use(folder, version))
        if folder == root:
            return


def _get_use(folder: Path, version: _Version) -> int:
    lines = (folder / "memory.stat").read_text().splitlines()
    statistics = dict(line.split() for line in lines)
    given_back = sum(int(statistics.get(name, 0)) for name in version.given_back)
    return int((folder / version.use).read_text()) - given_back
