"""What a server's processes share and its parent owns: a port, a private directory, memory."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from sensorium.server.metrics.memory import MetricMemory, list_writers
from sensorium.server.options import ServeOptions
from sensorium.server.processes.pulse import Pulse
from sensorium.types.errors import RequestError

# A socket's path has 107 characters at most (man 7 unix); its name needs some of them.
_MAX_DIRECTORY_LENGTH = 80
_SHORT_DIRECTORY = "/tmp"


class SharedResources:
    """All of it is made when this is; `close` removes it. `listener` is bound, and not listening
    before the first frontend does: until then connections are refused.
    """

    def __init__(self, options: ServeOptions) -> None:
        with ExitStack() as stack:
            self.listener = stack.enter_context(bind(options.host, options.port))
            self.shm_fd = _reserve_memory(options)
            if self.shm_fd is not None:
                stack.callback(os.close, self.shm_fd)
            self.pulse = stack.enter_context(Pulse.create())
            self.directory = _make_directory()
            stack.callback(shutil.rmtree, self.directory, ignore_errors=True)
            self._metrics = stack.enter_context(_make_metrics(self.directory, options))
            self.url = _make_url(options.host, self.listener)
            self._stack = stack.pop_all()

    @property
    def metrics_directory(self) -> Path:
        return self._metrics.directory

    @property
    def inherited_fds(self) -> tuple[int, ...]:
        """That every child gets."""
        return () if self.shm_fd is None else (self.shm_fd,)

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise RequestError(f"{host!r} is no address to listen on: {error.strerror}") from error
    try:
        # Connections of an earlier server that linger in TIME_WAIT are no obstacle.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise RequestError(
            f"can't listen on {host}, port {port}: {reason} (--port chooses another; 0 is any)"
        ) from error
    return listener


def _make_url(host: str, listener: socket.socket) -> str:
    port = listener.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _make_directory() -> Path:
    """For its owner alone."""
    try:
        directory = tempfile.mkdtemp(prefix="sensorium-")
        if len(directory) > _MAX_DIRECTORY_LENGTH:
            os.rmdir(directory)
            directory = tempfile.mkdtemp(prefix="sensorium-", dir=_SHORT_DIRECTORY)
    except OSError as error:
        raise _make_no_room_error(error) from error
    return Path(directory)


def _make_metrics(directory: Path, options: ServeOptions) -> MetricMemory:
    try:
        return MetricMemory(directory / "metrics", list_writers(options.api_server_count))
    except OSError as error:
        raise _make_no_room_error(error) from error


def _make_no_room_error(error: OSError) -> RequestError:
    return RequestError(
        "the server's sockets and metrics find no room in the directory for temporary files "
        f"(TMPDIR chooses it): {error.strerror or error}"
    )


def _reserve_memory(options: ServeOptions) -> int | None:
    """Its descriptor. The memory itself is not kept mapped here: the parent never looks at it."""
    if not options.shm_capacity_bytes:
        return None
    from sensorium.multimodal.cache.shm_memory import create_memory  # brings numpy along

    segment = create_memory(
        capacity_bytes=options.shm_capacity_bytes, max_object_bytes=options.shm_max_object_bytes
    )
    descriptor = os.dup(segment.fd)
    with segment:
        segment.close()
    return descriptor
