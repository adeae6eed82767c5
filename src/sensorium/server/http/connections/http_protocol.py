"""uvicorn's HTTP connection, with limits for clients that send or read too slowly.

The parser keeps a request's line, headers and trailers until they are complete, however long they
become and however slowly they come. Without a limit, one connection could fill the memory, and many
could stay forever, before any handler is called. `LimitedHttpProtocol` limits the size and the time
of headers. Bodies have limits of their own in `bodies.intake`.

`WatchedHttpProtocol` ends the connections of clients that don't read their responses. Unread data
waits in the kernel's queue and then in the connection's buffer. When the buffer is full, no more
chunks are made; the engine goes on to generate, and the text is kept once. If a client takes no
byte for the whole timeout, its connection is ended, and its request ends as if it had disconnected.
A client that reads slowly keeps its connection: any byte that its machine acknowledges counts. The
connection's buffer alone would not show that, because the kernel takes more data only when a large
part of its own queue is free again.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import socket
import struct
import sys
import termios
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# The size is checked after each read, so that headers may be larger by one read.
MAX_HEAD_BYTES = 2**16
_RETRY_AFTER_S = 1


class LimitedHttpProtocol(HttpToolsProtocol):
    """A connection that limits the size and the time of a request's head.

    It counts the bytes since the last read with a part of a body or the end of a request. A timer
    runs while the client has to send a first request, the rest of a head, or the rest of a body
    that was refused.
    """

    head_timeout_s = 30.0
    max_connections: int | None = None  # of this process; `None`: no limit

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._is_understood = False
        self._num_head_bytes = 0
        self._is_in_head = False
        self._is_in_body = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.max_connections is not None and len(self.connections) > self.max_connections:
            transport.write(_TOO_MANY)
            transport.close()
        else:
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._is_understood = False
        super().data_received(data)
        self._num_head_bytes = 0 if self._is_understood else self._num_head_bytes + len(data)
        if self.transport.is_closing():
            return
        if self._num_head_bytes > MAX_HEAD_BYTES:
            if self._is_answered:
                self.transport.write(_TOO_LARGE)
            self.transport.close()
        elif self._is_in_head and self._timer is None:
            self._start_timer()

    def on_message_begin(self) -> None:
        self._is_in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._is_in_head = False
        self._is_in_body = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._is_understood = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_understood = True
        self._is_in_body = False
        self._stop_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_in_body and self._timer is None:
            self._start_timer()  # the rest is discarded, but must come in time

    @property
    def _is_answered(self) -> bool:
        """Whether no request of this connection waits for its answer."""
        return self.cycle is None or self.cycle.response_complete

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self.head_timeout_s, self._end_slow_head)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_slow_head(self) -> None:
        self._timer = None
        if self.transport is None or self.transport.is_closing():
            return
        if not self._is_answered:
            self._start_timer()  # this head waits for the answer to the request before it
            return
        if self._is_in_head:
            self.transport.write(_TOO_SLOW)
        self.transport.close()


def _make_response(status: str, message: str, *, kind: str, code: str, headers: str = "") -> bytes:
    error = {"message": message, "type": kind, "param": None, "code": code}
    body = msgspec.json.encode({"error": error})
    head = (
        f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n{headers}connection: close\r\n\r\n"
    )
    return head.encode() + body


_TOO_LARGE = _make_response(
    "431 Request Header Fields Too Large",
    f"the headers are larger than {MAX_HEAD_BYTES} bytes",
    kind="invalid_request_error",
    code="headers_too_large",
)
_TOO_SLOW = _make_response(
    "408 Request Timeout",
    "The headers of the request came too slowly.",
    kind="invalid_request_error",
    code="timeout",
)
_TOO_MANY = _make_response(
    "503 Service Unavailable",
    "Too many connections. Retry later.",
    kind="service_unavailable_error",
    code="too_many_connections",
    headers=f"retry-after: {_RETRY_AFTER_S}\r\n",
)


logger = logging.getLogger(__name__)
_LOOKS_PER_TIMEOUT = 8
# How many intervals the time between two checks counts at most. If the event loop itself was
# delayed for longer, it has sent nothing in that time.
_MAX_GAP_LOOKS = 2
_LINGER_NOT = struct.pack("ii", 1, 0)  # the C struct linger: on, for 0 seconds


class UnreadWatch:
    """A count of the time in which nothing was taken from a buffer. It has no clock."""

    def __init__(self, timeout_s: float, *, num_bytes: int, now: float) -> None:
        self.interval_s = timeout_s / _LOOKS_PER_TIMEOUT
        self._timeout_s = timeout_s
        self._num_bytes = num_bytes
        self._looked = now
        self._unread_s = 0.0

    def look(self, now: float, num_bytes: int) -> bool:
        """Check the buffer, and return whether nothing was taken for the whole timeout."""
        gap_s = min(now - self._looked, _MAX_GAP_LOOKS * self.interval_s)
        self._unread_s = 0.0 if num_bytes < self._num_bytes else self._unread_s + gap_s
        self._looked, self._num_bytes = now, num_bytes
        return self._unread_s >= self._timeout_s


class WatchedHttpProtocol(LimitedHttpProtocol):
    """A connection that watches its buffer while the buffer is full."""

    stream_timeout_s = 60.0  # 0: the buffer is not watched

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._next_look: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.stream_timeout_s and self._next_look is None:
            watch = UnreadWatch(
                self.stream_timeout_s, num_bytes=self._count_unread(), now=self.loop.time()
            )
            self._look_later(watch)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_looking()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_looking()
        super().connection_lost(exc)

    def _look_later(self, watch: UnreadWatch) -> None:
        self._next_look = self.loop.call_later(watch.interval_s, self._look, watch)

    def _look(self, watch: UnreadWatch) -> None:
        if watch.look(self.loop.time(), self._count_unread()):
            logger.info("a client read nothing for %g s: it is cut off", self.stream_timeout_s)
            self._next_look = None
            self._cut_off()
            return
        self._look_later(watch)

    def _count_unread(self) -> int:
        """Return the bytes that wait in the connection's buffer and in the kernel's queue."""
        number = self.transport.get_extra_info("socket").fileno()
        queued = fcntl.ioctl(number, termios.TIOCOUTQ, bytes(4))
        return self.transport.get_write_buffer_size() + int.from_bytes(queued, sys.byteorder)

    def _cut_off(self) -> None:
        """End the connection, and let the kernel drop what it still holds for the client."""
        number = self.transport.get_extra_info("socket").fileno()
        with socket.socket(fileno=os.dup(number)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
        self.transport.abort()

    def _stop_looking(self) -> None:
        if self._next_look is not None:
            self._next_look.cancel()
            self._next_look = None


def make_http_protocol(
    *, head_timeout_s: float, max_connections: int | None, stream_timeout_s: float
) -> type[WatchedHttpProtocol]:
    """Return the class of connections with these limits, as uvicorn takes it."""
    limits = {
        "head_timeout_s": head_timeout_s,
        "max_connections": max_connections,
        "stream_timeout_s": stream_timeout_s,
    }
    return type("HttpProtocol", (WatchedHttpProtocol,), limits)
