"""What the parent and its child processes say to each other: one JSON value a line.

Each child has a stream socket to the parent. Its end means that the other side is gone, however
that came about.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from sensorium.engine.core_process.core_info import CoreInfo
from sensorium.server.options import ServeOptions
from sensorium.types.errors import InvariantError

logger = logging.getLogger(__name__)
_CHUNK_BYTES = 65_536


class StartCore(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The first message to a core. `life` counts the cores of one server, from 1."""

    options: ServeOptions
    socket_dir: str
    life: int
    shm_fd: int | None = None
    pulse_fd: int | None = None  # the page in which it writes that it moves on

    @property
    def endpoint(self) -> str:
        return f"ipc://{self.socket_dir}/core-{self.life}.sock"


class FrontendGone(msgspec.Struct, frozen=True, tag=True):
    """Nobody waits for the requests of this frontend any more."""

    identity: str


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Nothing is in flight: end."""


class StartFrontend(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The first message to a frontend, the `index`-th of its server. `identity` is never used
    again. `listen_fd`: a TCP socket that is bound.
    """

    options: ServeOptions
    index: int
    identity: str
    listen_fd: int
    socket_dir: str
    shm_fd: int | None = None


class CoreUp(msgspec.Struct, frozen=True, tag=True):
    """A core is ready. The first of them lets a frontend begin to serve."""

    info: CoreInfo


class CoreDown(msgspec.Struct, frozen=True, tag=True):
    reason: str


class CoreStalled(msgspec.Struct, frozen=True, tag=True):
    """The core is there, and has not moved on for longer than it may."""


class CoreResumed(msgspec.Struct, frozen=True, tag=True):
    """A core that was stalled moves on."""


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Take no new requests, finish those in flight, then end."""


class CoreReady(msgspec.Struct, frozen=True, tag=True):
    info: CoreInfo


class Serving(msgspec.Struct, frozen=True, tag=True):
    """The frontend accepts connections. `description`: for people, where no core has one."""

    description: tuple[tuple[str, str], ...] = ()


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The child can't start, and ends. `message` is for people."""

    message: str


ToCoreProcess = StartCore | FrontendGone | Stop
ToFrontend = StartFrontend | CoreUp | CoreDown | CoreStalled | CoreResumed | Drain
FromChild = CoreReady | Serving | Failed
Message = TypeVar("Message")


def encode_line(message: Any) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def decode_line(line: bytes) -> FromChild:
    """Of a child, on the parent's side."""
    return _FROM_CHILD.decode(line)


_FROM_CHILD: msgspec.json.Decoder[FromChild] = msgspec.json.Decoder(FromChild)
TO_CORE: msgspec.json.Decoder[ToCoreProcess] = msgspec.json.Decoder(ToCoreProcess)
TO_FRONTEND: msgspec.json.Decoder[ToFrontend] = msgspec.json.Decoder(ToFrontend)


class Channel(Generic[Message]):
    """A child's end. `send` may be called from any thread; one thread reads at a time."""

    def __init__(self, connection: socket.socket, decoder: msgspec.json.Decoder[Message]) -> None:
        self._connection = connection
        self._decoder = decoder
        self._received = bytearray()
        self._lock = threading.Lock()

    def send(self, message: FromChild) -> None:
        with self._lock:
            self._connection.sendall(encode_line(message))

    def receive(self) -> Message | None:
        """The next message. `None`: there will be none."""
        while (end := self._received.find(b"\n")) < 0:
            try:
                chunk = self._connection.recv(_CHUNK_BYTES)
            except ConnectionError:  # it ended with something of ours unread
                return None
            if not chunk:
                return None
            self._received += chunk
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        return self._decoder.decode(line)

    def start_reading(
        self,
        on_message: Callable[[Message], object],
        *,
        on_end: Callable[[], object],
        on_failure: Callable[[], object],
    ) -> None:
        """All further messages go to `on_message`, in a thread of their own; then `on_end` is
        called there. `on_failure` instead, if a message makes no sense or can't be obeyed.
        """

        def read() -> None:
            try:
                while (message := self.receive()) is not None:
                    on_message(message)
            except Exception:  # nobody else sees what happens in this thread
                logger.exception("a message of the parent could not be obeyed")
                on_failure()
            else:
                on_end()

        threading.Thread(target=read, name="sensorium-control", daemon=True).start()


def expect(message: Any, kind: type[Message]) -> Message:
    if not isinstance(message, kind):
        raise InvariantError(f"{type(message).__name__} came, {kind.__name__} was expected")
    return message
