"""Makes the anonymous memory in which all processes write their metrics.

`prometheus_client` writes memory-mapped files in a directory. If the disk is full, the first access
to a page that has no block ends the process with SIGBUS. So the files here are links to anonymous
memory (`memfd_create`), which is reserved when it is made, has no name and needs no disk.

Owns the descriptors. The links lead through `/proc/PID/fd` of the process that made them, so that
the others inherit nothing. A writer's files outlive it: the next life of the same process goes on
with their numbers.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Self

PARENT = "parent"
CORE = "core"
# Kind of file, as `prometheus_client` names it -> bytes that are reserved for it. That is about
# twice what all series of the table take. A file that needs more grows, and takes memory then.
_NUM_BYTES = {"counter": 2**16, "gauge_livesum": 2**16, "histogram": 2**18}


def get_frontend_name(index: int) -> str:
    """Return the name under which the `index`-th frontend writes."""
    return f"frontend-{index}"


def list_writers(num_frontends: int) -> list[str]:
    """Return the names of all processes that write metrics."""
    return [PARENT, CORE, *map(get_frontend_name, range(num_frontends))]


def get_path(directory: Path, kind: str, writer: str) -> Path:
    """Return the path of the file with a writer's values of a kind."""
    return directory / f"{kind}_{writer}.db"


class MetricMemory:
    """A directory with the files of all `writers`. Making it may raise an `OSError`."""

    def __init__(self, directory: Path, writers: Iterable[str]) -> None:
        self.directory = directory
        with ExitStack() as stack:
            directory.mkdir()
            for writer in writers:
                for kind, num_bytes in _NUM_BYTES.items():
                    fd = os.memfd_create("sensorium-metrics", os.MFD_CLOEXEC)
                    stack.callback(os.close, fd)
                    os.posix_fallocate(fd, 0, num_bytes)
                    get_path(directory, kind, writer).symlink_to(f"/proc/{os.getpid()}/fd/{fd}")
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Close the memory. It is freed when no process has it mapped any more."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
