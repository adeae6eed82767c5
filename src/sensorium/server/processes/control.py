"""Connects the parent and its child processes: the messages, and both ends of the socket.

A message is one line of JSON on a stream socket between the parent and one child. The end of that
connection means that the other side is gone, whatever the reason. A child never outlives its
parent.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from sensorium.engine.core_process import CoreInfo
from sensorium.server.options import ServeOptions
from sensorium.types.errors import InvariantError, SensoriumError

logger = logging.getLogger(__name__)
_MAX_LINE_BYTES = 2**24
_END_S = 5.0  # from the end of a child's connection to that of its process
_REMOVAL_TRIES = 3
_MAX_MESSAGE_LENGTH = 4000


class StartCore(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The parent's first message to a core: its options, and the descriptors that it inherits."""

    options: ServeOptions
    socket_dir: str
    life: int  # the number of this core among those of one server, from 1
    shm_fd: int | None = None  # memory for media; None: the processes share none
    pulse_fd: int | None = None  # the page in which the core writes its signs of life

    @property
    def endpoint(self) -> str:
        """Return the ZeroMQ address at which this core receives requests from frontends."""
        return f"ipc://{self.socket_dir}/core-{self.life}.sock"


class FrontendGone(msgspec.Struct, frozen=True, tag=True):
    """A message to the core that a frontend has ended, so that the core aborts its requests."""

    identity: str


class Stop(msgspec.Struct, frozen=True, tag=True):
    """A message to the core to end its process, sent after all frontends have ended."""


class StartFrontend(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The parent's first message to a frontend: its options, and descriptors that it inherits."""

    options: ServeOptions
    index: int  # of the frontend in its server, from 0
    identity: str  # no other frontend ever gets the same
    listen_fd: int  # a TCP socket that is bound
    counts_fd: int  # a page in which each frontend writes at its index how many requests it serves
    socket_dir: str
    shm_fd: int | None = None  # memory for media; None: the processes share none
    is_restart: bool = False  # it replaces a frontend that has ended


class CoreUp(msgspec.Struct, frozen=True, tag=True):
    """A message to a frontend that a core is ready; at the first one it begins to serve HTTP."""

    info: CoreInfo


class CoreDown(msgspec.Struct, frozen=True, tag=True):
    """A message to a frontend that the core has ended, so that the requests in flight fail."""

    reason: str  # for the clients of these requests


class CoreStalled(msgspec.Struct, frozen=True, tag=True):
    """A message that the core makes no progress; `/health` of the frontend then returns 503."""


class CoreResumed(msgspec.Struct, frozen=True, tag=True):
    """A message to a frontend that a stalled core makes progress again."""


class Drain(msgspec.Struct, frozen=True, tag=True):
    """A message to a frontend to finish its requests in flight, accept no more, and end."""


class CoreReady(msgspec.Struct, frozen=True, tag=True):
    """A message to the parent that the core has loaded its model and accepts requests."""

    info: CoreInfo


class Serving(msgspec.Struct, frozen=True, tag=True):
    """A message to the parent that a frontend accepts HTTP connections."""

    description: tuple[tuple[str, str], ...] = ()  # for people, if there is no core to give one


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A message to the parent that a child can't start, and will end."""

    message: str  # for people


ToCoreProcess = StartCore | FrontendGone | Stop
ToFrontend = StartFrontend | CoreUp | CoreDown | CoreStalled | CoreResumed | Drain
FromChild = CoreReady | Serving | Failed
Message = TypeVar("Message")
Start = TypeVar("Start")
FROM_CHILD: msgspec.json.Decoder[FromChild] = msgspec.json.Decoder(FromChild)
TO_CORE: msgspec.json.Decoder[ToCoreProcess] = msgspec.json.Decoder(ToCoreProcess)
TO_FRONTEND: msgspec.json.Decoder[ToFrontend] = msgspec.json.Decoder(ToFrontend)


def encode_line(message: Any) -> bytes:
    return msgspec.json.encode(message) + b"\n"


# ---- the parent's end of the connection


@dataclass(slots=True, eq=False)
class ChildProcess:
    """A child process, and the parent's end of the socket that connects them."""

    name: str
    _process: asyncio.subprocess.Process
    _connection: socket.socket  # another descriptor of what the streams read and write
    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter
    _rest: bytes = b""  # bytes that were read from the socket, after the stream was closed

    @classmethod
    async def spawn(
        cls,
        name: str,  # in log lines
        command: Sequence[str],
        *,
        inherited_fds: Sequence[int],
        environment: Mapping[str, str],
    ) -> ChildProcess:
        """Start a child process that is connected to this process by a socket.

        The descriptor of the child's end is appended to `command` as the last argument. The child
        runs in a session of its own, so that Ctrl+C in a terminal sends a signal to the parent
        only. Raise an `OSError` if the process can't be started.
        """
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
        """Send a message, or do nothing if the connection is closed, which `receive` reports."""
        if not self._writer.is_closing():
            self._writer.write(encode_line(message))

    async def receive(self) -> FromChild | None:
        """Return the next message from the child, or `None` if the connection has ended.

        If a message can't be decoded, the child is killed and the result is `None`.
        """
        try:
            line = await self._read_line()
            return FROM_CHILD.decode(line) if line else None
        except (ValueError, msgspec.MsgspecError) as error:  # too long, cut off, or no message
            logger.error(
                "%s sent a message that can't be read, and is killed: %s", self.name, error
            )
            self.kill()
            return None

    async def _read_line(self) -> bytes:
        """Return the next line from the child, or no bytes at the end of the connection."""
        with suppress(ConnectionError):
            return await self._reader.readline()
        # A write to a child that has ended fails, and closes the stream although it has lines that
        # were not read yet. One of them may contain the reason for the child's end. So the rest is
        # read from the socket itself.
        with suppress(OSError):
            while read := self._connection.recv(2**16):
                self._rest += read
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    async def wait_until_ended(self) -> str:
        """Wait until the child has ended, and return its exit status in words.

        This is called when the connection has ended. The child is killed if it still runs `_END_S`
        seconds later.
        """
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), _END_S)
        self.kill()
        status = await self._process.wait()
        self._writer.close()  # only now: to a living child this is the end of the parent
        self._connection.close()
        return describe_status(status)

    def kill(self) -> None:
        """Kill the child with SIGKILL, unless it has ended."""
        # Not by `Process.kill`, which may collect the exit status that another task waits for.
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)


def describe_status(status: int) -> str:
    """Return an exit status in words: "status 1", or "signal SIGKILL" for -9."""
    if status >= 0:
        return f"status {status}"
    with suppress(ValueError):
        return f"signal {signal.Signals(-status).name}"
    return f"signal {-status}"


# ---- a child's end of the connection


class Channel(Generic[Message]):
    """A child's end of the socket that connects it to its parent.

    Any thread may call `send`. Only one thread at a time may call `receive`.
    """

    def __init__(self, connection: socket.socket, decoder: msgspec.json.Decoder[Message]) -> None:
        self._connection = connection
        self._lines = connection.makefile("rb")
        self._decoder = decoder
        self._lock = threading.Lock()

    def send(self, message: FromChild) -> None:
        """Send a message to the parent, or raise an `OSError` if the connection has ended."""
        with self._lock:
            self._connection.sendall(encode_line(message))

    def receive(self) -> Message | None:
        """Return the next message from the parent, or `None` if the connection has ended.

        Raise an error of msgspec if the message can't be decoded.
        """
        try:
            line = self._lines.readline()
        except ConnectionError:  # the parent ended before it had read all that was sent
            return None
        # A line without its end was cut off.
        return self._decoder.decode(line) if line.endswith(b"\n") else None

    def start_reading(
        self,
        on_message: Callable[[Message], object],
        *,
        on_end: Callable[[], object],
        on_failure: Callable[[], object],
    ) -> None:
        """Start a thread that calls `on_message` with each message, and `on_end` after the last.

        If a message can't be decoded or `on_message` raises, the thread calls `on_failure` instead
        and stops.
        """

        def read() -> None:
            try:
                while (message := self.receive()) is not None:
                    on_message(message)
            except Exception:  # no other code would notice a failure in this thread
                logger.exception("a message from the parent process could not be handled; exiting")
                on_failure()
            else:
                on_end()

        threading.Thread(target=read, name="sensorium-control", daemon=True).start()


def open_channel(decoder: msgspec.json.Decoder[Message]) -> Channel[Message]:
    """Open the channel on the descriptor in the last argument, and ignore signals from now on."""
    faulthandler.enable()
    # Terminals and service managers send these to all processes. The parent decides what follows.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    descriptor = int(sys.argv[-1])
    os.set_inheritable(descriptor, False)
    return Channel(socket.socket(fileno=descriptor), decoder)


def receive_start(channel: Channel[Any], kind: type[Start]) -> Start:
    """Return the parent's first message, or exit with status 1 if the parent is gone.

    Raise an `InvariantError` if the message is not of the type `kind`.
    """
    message = channel.receive()
    if message is None:
        sys.exit(1)
    if not isinstance(message, kind):
        raise InvariantError(
            f"the parent process first sent {type(message).__name__} instead of {kind.__name__}"
        )
    return message


def follow_parent(
    channel: Channel[Message], on_message: Callable[[Message], object], *, socket_dir: str
) -> None:
    """Start a thread that handles the parent's messages and ends this process with the parent.

    Nothing that the main thread does can delay that end. If a message can't be handled, this
    process exits as well, and the parent starts it again.
    """
    channel.start_reading(
        on_message, on_end=lambda: end_with_parent(socket_dir), on_failure=lambda: os._exit(1)
    )


def end_with_parent(socket_dir: str) -> None:
    """Remove the directory for sockets, which a killed parent can't, and exit with status 1."""
    for _ in range(_REMOVAL_TRIES):  # other children also remove it, or still write
        shutil.rmtree(socket_dir, ignore_errors=True)
        if not os.path.exists(socket_dir):
            break
    os._exit(1)


def report_failure(channel: Channel[Any], error: BaseException) -> None:
    """Send the parent the reason why this process can't start, and log the traceback of a bug."""
    if isinstance(error, InvariantError) or not isinstance(error, SensoriumError):
        logger.error("this process ends because of an internal error", exc_info=error)
    message = str(error)
    if not isinstance(error, SensoriumError):
        message = f"{type(error).__name__}: {error}" if message else type(error).__name__
    channel.send(Failed(message[:_MAX_MESSAGE_LENGTH]))
