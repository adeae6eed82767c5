"""Makes the resources that the parent owns and all processes of a server share.

One of them is the pulse of the core: the time at which it last made progress. To the kernel a
process is alive even if it is stopped, or waits for a device that never answers. So the thread that
computes writes the time in every round of its loop and before every block of the model. It keeps
writing during a long step on a slow machine, and stops when it hangs, whatever other threads do.

Pages are anonymous memory (`memfd_create`), reserved when they are made; children inherit their
descriptors.
"""

from __future__ import annotations

import mmap
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sensorium.server.metrics.shared_files import making_files
from sensorium.server.options import ServeOptions
from sensorium.types.errors import RequestError

# A socket's path has 107 characters at most (man 7 unix); its name needs some of them.
_MAX_DIRECTORY_LENGTH = 80
_SHORT_DIRECTORY = "/tmp"
_PAGE_BYTES = mmap.PAGESIZE
_BEAT, _LONG_WORK = 0, 1  # places in the page, in units of 8 bytes
# The time between two checks by the parent counts as this many intervals of silence at most. If the
# parent itself was delayed, with the whole machine or container, it has not watched all that time.
_MAX_GAP_LOOKS = 2
_LOOKS_PER_LIMIT = 10
_MAX_LOOK_S = 1.0
_BEATS_PER_LIMIT = 5

Verdict = Literal["moves", "stalled", "lost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedResources:
    """The memory and the directories that the parent creates and all processes share."""

    shm_fd: int | None  # memory for media, if the processes share any
    pulse: Pulse
    # How many requests each frontend serves, by its index; then how many live sessions.
    request_counts: SharedNumbers
    directory: Path  # for sockets; only its owner can read it
    metrics_directory: Path  # in which all processes write their metrics


@contextmanager
def sharing_resources(options: ServeOptions) -> Iterator[SharedResources]:
    """Create the resources that the processes of a server share, and remove them after the block.

    Raise a `SensoriumError` if there is too little memory or disk.
    """
    with ExitStack() as stack:
        shm_fd = _reserve_memory(options)
        if shm_fd is not None:
            stack.callback(os.close, shm_fd)
        pulse = stack.enter_context(closing(Pulse.create()))
        request_counts = stack.enter_context(closing(SharedNumbers.create()))
        try:
            directory = _make_directory()
            stack.callback(shutil.rmtree, directory, ignore_errors=True)
            files = making_files(directory / "metrics", num_frontends=options.api_server_count)
            stack.enter_context(files)
        except OSError as error:
            raise RequestError(
                "the server's sockets and metrics can't be stored in the temporary directory "
                f"(set TMPDIR to use another one): {error.strerror or error}"
            ) from error
        yield SharedResources(
            shm_fd=shm_fd,
            pulse=pulse,
            request_counts=request_counts,
            directory=directory,
            metrics_directory=directory / "metrics",
        )


@dataclass(frozen=True, slots=True)
class Address:
    """The URL of a server and its TCP socket, which is bound and on which only frontends listen.

    Connections are refused until the first frontend listens.
    """

    listener: socket.socket
    url: str

    @classmethod
    def bind(cls, host: str, port: int) -> Address:
        """Return the address of a host and port, or raise a `RequestError` if it can't be used."""
        listener = _bind(host, port)
        name = f"[{host}]" if ":" in host else host
        return cls(listener, f"http://{name}:{listener.getsockname()[1]}")

    def close(self) -> None:
        self.listener.close()


def _bind(host: str, port: int) -> socket.socket:
    """Return a bound TCP socket that does not listen yet; port 0 means any free port."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise RequestError(
            f"{host!r} is no address to listen on (--host sets it): {error.strerror}"
        ) from error
    try:
        # Connections of an earlier server may still be in TIME_WAIT on the same port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise RequestError(
            f"the server can't listen on {host}, port {port}: {reason} (--port sets another one; 0 "
            "means any free port)"
        ) from error
    return listener


def _make_directory() -> Path:
    """Create a directory that only its owner can access, in `/tmp` if its path is too long."""
    directory = tempfile.mkdtemp(prefix="sensorium-")
    if len(directory) > _MAX_DIRECTORY_LENGTH:
        os.rmdir(directory)
        directory = tempfile.mkdtemp(prefix="sensorium-", dir=_SHORT_DIRECTORY)
    return Path(directory)


def _reserve_memory(options: ServeOptions) -> int | None:
    """Reserve shared memory for processed media, and return its descriptor; `None` if unused."""
    if not options.shm_capacity_bytes:
        return None
    from sensorium.multimodal.cache.shm_memory import create_memory  # late: it imports numpy

    segment = create_memory(
        capacity_bytes=options.shm_capacity_bytes, max_object_bytes=options.media.max_object_bytes
    )
    descriptor = os.dup(segment.fd)
    with segment:  # not mapped into this process, because the parent never reads it
        segment.close()
    return descriptor


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """The last sign of life of the core, as the parent reads it."""

    beat: float  # when the core last made progress, by the monotonic clock; 0: not yet
    is_long_work: bool  # it has announced work that gives no signs of life


class SharedNumbers:
    """A page of shared memory with floating-point numbers, which are 0 at first.

    Each process has an object of its own for the same page.
    """

    def __init__(self, fd: int) -> None:
        """Map the page of a descriptor, and own it; callers use `create` or `attach` instead."""
        self.fd = fd
        self._map = mmap.mmap(fd, _PAGE_BYTES)
        # Aligned stores of 8 bytes: a reader never sees half a number.
        self.values = memoryview(self._map).cast("d")

    @classmethod
    def create(cls) -> SharedNumbers:
        fd = os.memfd_create("sensorium-numbers", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, _PAGE_BYTES)
            return cls(fd)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int) -> SharedNumbers:
        """Return an object for the page of an inherited `fd`, which the caller still closes."""
        return cls(os.dup(fd))

    def close(self) -> None:
        """Unmap the page, which still exists for other processes, and close this descriptor."""
        self.values.release()
        self._map.close()
        os.close(self.fd)


class Pulse:
    """The core's signs of life in shared memory, by which the parent notices a core that hangs."""

    def __init__(self, numbers: SharedNumbers) -> None:
        self._numbers = numbers
        self._values = numbers.values

    @classmethod
    def create(cls) -> Pulse:
        return cls(SharedNumbers.create())

    @classmethod
    def attach(cls, fd: int) -> Pulse:
        """Return an object for the page of an inherited `fd`, which the caller still closes."""
        return cls(SharedNumbers.attach(fd))

    @property
    def fd(self) -> int:
        return self._numbers.fd

    def beat(self) -> None:
        """Write the current time, as the sign that the core makes progress."""
        self._values[_BEAT] = time.monotonic()

    def note_long_work(self, is_begun: bool) -> None:
        """Write that long work without signs of life, such as compiling kernels, begins or ends.

        While it lasts, the core does not count as stalled.
        """
        self.beat()
        self._values[_LONG_WORK] = float(is_begun)

    def clear(self) -> None:
        """Remove all signs of life, before another core is started."""
        self._values[_BEAT] = self._values[_LONG_WORK] = 0.0

    def read(self) -> Sign:
        return Sign(beat=self._values[_BEAT], is_long_work=bool(self._values[_LONG_WORK]))

    def close(self) -> None:
        self._numbers.close()


def get_look_interval(limit_s: float) -> float:
    """Return the seconds between two looks at a pulse that may be silent for `limit_s` seconds."""
    return min(_MAX_LOOK_S, limit_s / _LOOKS_PER_LIMIT)


def get_idle_interval(limit_s: float) -> float:
    """Return the longest time in seconds between two beats of a core without requests."""
    return min(_MAX_LOOK_S, limit_s / _BEATS_PER_LIMIT)


class StallWatch:
    """A rule by which the parent decides whether the core makes progress.

    A core is stalled after `limit_s` seconds without a sign of life, and lost after twice that
    time. The rule reads no clock, so that tests can pass any time.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._max_gap_s = _MAX_GAP_LOOKS * get_look_interval(limit_s)
        self._looked: float | None = None  # the time of the last check
        self._beat = 0.0  # at the last check
        self._silent_s = 0.0

    def look(self, now: float, sign: Sign) -> Verdict:
        """Return the verdict at the monotonic time `now`, with the core's last sign of life.

        Before the first sign of life and during long work the verdict is "moves".
        """
        gap_s = 0.0 if self._looked is None else min(now - self._looked, self._max_gap_s)
        self._looked = now
        if sign.beat != self._beat or sign.is_long_work or not sign.beat:
            self._silent_s = 0.0
        else:
            self._silent_s += gap_s
        self._beat = sign.beat
        if self._silent_s >= 2 * self._limit_s:
            return "lost"
        return "stalled" if self._silent_s >= self._limit_s else "moves"
