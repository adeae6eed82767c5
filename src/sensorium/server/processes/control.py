"""The connection between the parent and a child process: its messages, and both of its ends.

Each child has a stream socket to the parent, on which a message is one line of JSON. The end of
that connection means that the other side is gone, whatever the reason. A child never outlives its
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
    """The first message to a core."""

    options: ServeOptions
    socket_dir: str
    life: int  # the number of this core among those of one server, from 1
    shm_fd: int | None = None
    pulse_fd: int | None = None  # the page in which the core writes its signs of life

    @property
    def endpoint(self) -> str:
        """Return the address at which this core takes requests."""
        return f"ipc://{self.socket_dir}/core-{self.life}.sock"


class FrontendGone(msgspec.Struct, frozen=True, tag=True):
    """A frontend has ended, and its requests with it."""

    identity: str


class Stop(msgspec.Struct, frozen=True, tag=True):
    """An order to the core to end, because no request is in flight any more."""


class StartFrontend(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The first message to a frontend."""

    options: ServeOptions
    index: int  # of the frontend in its server, from 0
    identity: str  # no other frontend ever gets the same
    listen_fd: int  # a TCP socket that is bound
    socket_dir: str
    shm_fd: int | None = None


class CoreUp(msgspec.Struct, frozen=True, tag=True):
    """A core is ready. The first of these messages lets a frontend begin to serve."""

    info: CoreInfo


class CoreDown(msgspec.Struct, frozen=True, tag=True):
    """The core has ended."""

    reason: str


class CoreStalled(msgspec.Struct, frozen=True, tag=True):
    """The core is alive, but has made no progress for too long."""


class CoreResumed(msgspec.Struct, frozen=True, tag=True):
    """A core that was stalled makes progress again."""


class Drain(msgspec.Struct, frozen=True, tag=True):
    """An order to take no new requests, finish those in flight, and end."""


class CoreReady(msgspec.Struct, frozen=True, tag=True):
    """The core has loaded its model and takes requests."""

    info: CoreInfo


class Serving(msgspec.Struct, frozen=True, tag=True):
    """The frontend accepts connections."""

    description: tuple[tuple[str, str], ...] = ()  # for people, if there is no core to give one


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The child can't start, and ends."""

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
    """Return a message as a line."""
    return msgspec.json.encode(message) + b"\n"


# ---- the parent's end of the connection


@dataclass(slots=True, eq=False)
class ChildProcess:
    """A child process and the parent's end of the connection to it. `spawn` starts one."""

    name: str
    _process: asyncio.subprocess.Process
    _connection: socket.socket  # another descriptor of what the streams read and write
    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter
    _rest: bytes = b""  # bytes that were read from the socket, after the stream was closed

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
            return FROM_CHILD.decode(line) if line else None
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


# ---- a child's end of the connection


class Channel(Generic[Message]):
    """A child's end of its connection to the parent.

    Any thread may call `send`. One thread at a time may read.
    """

    def __init__(self, connection: socket.socket, decoder: msgspec.json.Decoder[Message]) -> None:
        self._connection = connection
        self._lines = connection.makefile("rb")
        self._decoder = decoder
        self._lock = threading.Lock()

    def send(self, message: FromChild) -> None:
        """Send a message to the parent."""
        with self._lock:
            self._connection.sendall(encode_line(message))

    def receive(self) -> Message | None:
        """Return the next message, or `None` if the connection has ended."""
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
        """Pass all further messages to `on_message`, in a thread of their own.

        At the end of the connection `on_end` is called there, or `on_failure` if a message can't be
        read or `on_message` raises.
        """

        def read() -> None:
            try:
                while (message := self.receive()) is not None:
                    on_message(message)
            except Exception:  # no other code would notice a failure in this thread
                logger.exception("a message of the parent could not be handled")
                on_failure()
            else:
                on_end()

        threading.Thread(target=read, name="sensorium-control", daemon=True).start()


def open_channel(decoder: msgspec.json.Decoder[Message]) -> Channel[Message]:
    """Return this child's end of its connection. Its descriptor is the last argument of argv.

    Signals are ignored from now on: a terminal or a service manager sends them to all processes,
    and the parent decides what follows.
    """
    faulthandler.enable()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    descriptor = int(sys.argv[-1])
    os.set_inheritable(descriptor, False)
    return Channel(socket.socket(fileno=descriptor), decoder)


def receive_start(channel: Channel[Any], kind: type[Start]) -> Start:
    """Return the first message, or end this process if the parent is gone."""
    message = channel.receive()
    if message is None:
        sys.exit(1)
    if not isinstance(message, kind):
        raise InvariantError(f"{type(message).__name__} came, {kind.__name__} was expected")
    return message


def follow_parent(
    channel: Channel[Message], on_message: Callable[[Message], object], *, socket_dir: str
) -> None:
    """Handle the parent's messages from now on, and end when the parent ends.

    This happens in a thread, so that nothing the main thread does can delay the end. A child that
    can't read its parent's messages ends too, and is started again.
    """
    channel.start_reading(
        on_message, on_end=lambda: end_with_parent(socket_dir), on_failure=lambda: os._exit(1)
    )


def end_with_parent(socket_dir: str) -> None:
    """End this process, because the parent was killed, and remove the parent's directory."""
    for _ in range(_REMOVAL_TRIES):  # other children remove it too, or still write
        shutil.rmtree(socket_dir, ignore_errors=True)
        if not os.path.exists(socket_dir):
            break
    os._exit(1)


def report_failure(channel: Channel[Any], error: BaseException) -> None:
    """Send the parent the reason why this process can't start.

    Only a bug of Sensorium is logged with a traceback.
    """
    if isinstance(error, InvariantError) or not isinstance(error, SensoriumError):
        logger.error("this process can't start", exc_info=error)
    message = str(error)
    if not isinstance(error, SensoriumError):
        message = f"{type(error).__name__}: {error}" if message else type(error).__name__
    channel.send(Failed(message[:_MAX_MESSAGE_LENGTH]))
