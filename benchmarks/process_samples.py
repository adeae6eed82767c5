"""Memory, file descriptors and threads of a server's processes, by what each of them does."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_ROLES = {"core_main": "core", "frontend_main": "frontend", "pool": "pool worker"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSample:
    """What one process used at one moment, as Linux counts it."""

    seconds: float
    role: str
    pid: int
    uss_kib: int  # memory that no other process shares
    pss_kib: int  # the same, with this process's share of the rest
    num_fds: int
    num_threads: int


def list_tree(pid: int) -> list[int]:
    """Return a process and all below it."""
    children: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children += [int(word) for word in path.read_text().split()]
        except OSError:
            continue
    return [pid, *(entry for child in children for entry in list_tree(child))]


def get_cpu_seconds(pid: int) -> float:
    """Return seconds in user and system mode, of a process and of its children that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / 100


def sample_tree(pid: int, *, seconds: float) -> list[ProcessSample]:
    samples = (_sample(entry, pid, seconds) for entry in list_tree(pid))
    return [sample for sample in samples if sample is not None]


def _sample(pid: int, root: int, seconds: float) -> ProcessSample | None:
    """Return a sample of the process, or `None` if it has ended meanwhile."""
    try:
        sizes = _read_sizes(pid)
        return ProcessSample(
            seconds=seconds,
            role="parent" if pid == root else _get_role(pid),
            pid=pid,
            uss_kib=sizes["Private_Clean"] + sizes["Private_Dirty"],
            pss_kib=sizes["Pss"],
            num_fds=len(list(Path(f"/proc/{pid}/fd").iterdir())),
            num_threads=len(list(Path(f"/proc/{pid}/task").iterdir())),
        )
    except (OSError, KeyError):
        return None


def _read_sizes(pid: int) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, value, *_ = line.split()
        sizes[name.removesuffix(":")] = int(value)
    return sizes


def _get_role(pid: int) -> str:
    command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    return next((role for word, role in _ROLES.items() if word in command), "other")


def summarise(
    samples: Sequence[ProcessSample], *, windows: Sequence[tuple[float, float]]
) -> dict[str, dict[str, list[float]]]:
    """Return medians by role in each window of seconds, summed over the processes of a role."""
    summary: dict[str, dict[str, list[float]]] = {}
    for role in sorted({sample.role for sample in samples}):
        own = [sample for sample in samples if sample.role == role]
        summary[role] = {
            name: [_get_median(own, name, window) for window in windows]
            for name in ("uss_kib", "pss_kib", "num_fds", "num_threads")
        }
    return summary


def _get_median(samples: Sequence[ProcessSample], name: str, window: tuple[float, float]) -> float:
    sums: dict[float, float] = {}
    for sample in samples:
        if window[0] <= sample.seconds < window[1]:
            sums[sample.seconds] = sums.get(sample.seconds, 0.0) + getattr(sample, name)
    return statistics.median(sums.values()) if sums else 0.0
