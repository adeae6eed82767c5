"""The parent's hold on one child process: starts it, talks with it, learns of its end."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Commands:
    """What is run for each kind of child. The descriptor of its connection is added."""

    core: tuple[str, ...]
    frontend: tuple[str, ...]


def make_commands() -> Commands:
    """Fresh interpreters, which don't look into the current directory."""
    run_module = (sys.executable, "-P", "-m")
    return Commands(
        core=(*run_module, "sensorium.server.processes.core_main"),
        frontend=(*run_module, "sensorium.server.processes.frontend_main"),
    )


def make_environment(metrics_directory: os.PathLike[str]) -> dict[str, str]:
    """Children find the modules that this process finds. Where the metrics of all processes lie
    is told in the only way that `prometheus_client` hears.
    """
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        "PROMETHEUS_MULTIPROC_DIR": os.fspath(metrics_directory),
    }


class ChildProcess:
    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        connection: socket.socket,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Use `spawn`. `connection` is another descriptor of what the streams read and write."""
        self.name = name
        self._process = process
        self._connection = connection
        self._rest = b""  # what was read from it
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
        """In a session of its own: a terminal's signals are for the parent."""
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

    @property
    def process_id(self) -> int:
        return self._process.pid

    def send(self, message: Any) -> None:
        """Nothing, if it is gone: its end is learned elsewhere."""
        if not self._writer.is_closing():
            self._writer.write(encode_line(message))

    async def receive(self) -> FromChild | None:
        """The next message. `None`: it is gone, or made no sense and was killed."""
        try:
            line = await self._read_line()
            return decode_line(line) if line else None
        except (ValueError, msgspec.MsgspecError) as error:  # too long, cut off, or no message
            logger.error("%s said something that can't be read: %s", self.name, error)
            self.kill()
            return None

    async def _read_line(self) -> bytes:
        """Nothing: there is no more. A write to a child that has ended fails, and its stream is
        closed with all that was not read yet: that may be the reason of the end.
        """
        with suppress(ConnectionError):
            return await self._reader.readline()
        with suppress(OSError):
            while read := self._connection.recv(2**16):
                self._rest += read
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    async def wait_until_ended(self) -> str:
        """How it ended, in words. It has no more to say: if it lingers, it is killed."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), _END_S)
        self.kill()
        status = await self._process.wait()
        self._writer.close()  # not before: a child that lives takes it for the parent's end
        self._connection.close()
        return describe_status(status)

    def kill(self) -> None:
        """Not by `Process.kill`: it may take the status away from the one who waits for it."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)


def describe_status(status: int) -> str:
    if status >= 0:
        return f"status {status}"
    with suppress(ValueError):
        return f"signal {signal.Signals(-status).name}"
    return f"signal {-status}"
