"""Starts one child process, exchanges messages with it, and detects its end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from sensorium.server.processes.control import FromChild, decode_line, encode_line

logger = logging.getLogger(__name__)
_MAX_LINE_BYTES = 2**24
_END_S = 5.0  # from the end of a child's connection to that of its process
# The defaults of a `RestartPolicy`.
_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 30.0
MAX_TRIES = 5
SETTLED_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Commands:
    """The command for each kind of child. The descriptor of its connection is added to it."""

    core: tuple[str, ...]
    frontend: tuple[str, ...]


def make_commands() -> Commands:
    """Return commands for fresh interpreters that don't look into the current directory."""
    run_module = (sys.executable, "-P", "-m")
    return Commands(
        core=(*run_module, "sensorium.server.processes.core_main"),
        frontend=(*run_module, "sensorium.server.processes.frontend_main"),
    )


def make_environment(metrics_directory: os.PathLike[str]) -> dict[str, str]:
    """Return the environment of children.

    They find the modules that this process finds. The directory of the metrics of all processes is
    given in the only way that `prometheus_client` reads.
    """
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "PROMETHEUS_MULTIPROC_DIR": os.fspath(metrics_directory),
    }


class ChildProcess:
    """A child process and the parent's end of the connection to it."""

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        connection: socket.socket,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Do not call this; use `spawn` instead."""
        self.name = name
        self._process = process
        self._connection = connection  # another descriptor of what the streams read and write
        self._rest = b""  # bytes that were read from the socket, after the stream was closed
        self._reader = reader
        self._writer = writer

    @classmethod
    async def spawn(
        cls,
        name: str,
        command: Sequence[str],
        *,
        inherited_fds: Sequence[int],
        environment: Mapping[str, str],
    ) -> ChildProcess:
        """Start a child in a session of its own, so that a terminal's signals reach the parent."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    str(theirs.fileno()),
                    pass_fds=(theirs.fileno(), *inherited_fds),
                    stdin=asyncio.subprocess.DEVNULL,
                    env=environment,
                    start_new_session=True,
                )
        except BaseException:
            ours.close()
            raise
        ours.setblocking(False)
        connection = ours.dup()
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=_MAX_LINE_BYTES)
        return cls(name, process, connection, reader, writer)

    def send(self, message: Any) -> None:
        """Send a message, unless the child is gone; its end is noticed elsewhere."""
        if not self._writer.is_closing():
            self._writer.write(encode_line(message))

    async def receive(self) -> FromChild | None:
        """Return the next message, or `None` if the child is gone.

        A child that sends what can't be read is killed.
        """
        try:
            line = await self._read_line()
            return decode_line(line) if line else None
        except (ValueError, msgspec.MsgspecError) as error:  # too long, cut off, or no message
            logger.error("%s sent a message that can't be read: %s", self.name, error)
            self.kill()
            return None

    async def _read_line(self) -> bytes:
        """Return the next line, or nothing at the end of the connection.

        A write to a child that has ended fails, and closes the stream with all that was not read
        yet. The reason of the child's end may be in there, so the rest is read from the socket.
        """
        with suppress(ConnectionError):
            return await self._reader.readline()
        with suppress(OSError):
            while read := self._connection.recv(2**16):
                self._rest += read
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    async def wait_until_ended(self) -> str:
        """Wait for the end of the process, and return how it ended, in words.

        Its connection has ended, so a process that lingers is killed.
        """
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), _END_S)
        self.kill()
        status = await self._process.wait()
        self._writer.close()  # only now: a living child would take it for the end of the parent
        self._connection.close()
        return describe_status(status)

    def kill(self) -> None:
        """Kill the process if it lives.

        `Process.kill` is not used, because it may collect the exit status that another task waits
        for.
        """
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)


def describe_status(status: int) -> str:
    """Return the status of a process in words."""
    if status >= 0:
        return f"status {status}"
    with suppress(ValueError):
        return f"signal {signal.Signals(-status).name}"
    return f"signal {-status}"


class RestartPolicy:
    """A rule for when a process that has ended is started again, or given up. It has no clock.

    The pauses double with each end. After a process that lived for `settled_s`, they begin anew.
    """

    def __init__(
        self,
        *,
        max_tries: int = MAX_TRIES,
        first_pause_s: float = _FIRST_PAUSE_S,
        max_pause_s: float = _MAX_PAUSE_S,
        settled_s: float = SETTLED_S,
    ) -> None:
        self.max_tries = max_tries
        self._first_pause_s = first_pause_s
        self._max_pause_s = max_pause_s
        self._settled_s = settled_s
        self._num_ends = 0

    def note_end(self, *, lived_s: float) -> float | None:
        """Count an end. Return the seconds until the next start, or `None` to give up."""
        if lived_s >= self._settled_s:
            self._num_ends = 0
        self._num_ends += 1
        if self._num_ends > self.max_tries:
            return None
        return min(self._first_pause_s * 2.0 ** (self._num_ends - 1), self._max_pause_s)
