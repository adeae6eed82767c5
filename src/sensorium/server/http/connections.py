"""Handles clients that are slow or leave, and keeps long work away from the event loop.

uvicorn's parser keeps a request's line, headers and trailers until they are complete, however long
they become and however slowly they come. Without a limit, one connection could fill the memory, and
many could stay forever, before any handler is called. `LimitedHttpProtocol` limits the size and the
time of headers. Bodies have limits of their own in `bodies.intake`.

It also ends the connections of clients that don't read their responses. Unread data waits in the
kernel's queue and then in the connection's buffer. When the buffer is full, no more chunks are
made; the engine goes on to generate, and the text is kept once. If a client takes no byte for the
whole timeout, its connection is ended, and its request ends as if it had disconnected. A client
that reads slowly keeps its connection: any byte that its machine acknowledges counts. The
connection's buffer alone would not show that, because the kernel takes more data only when a large
part of its own queue is free again.

`run_until_disconnect` ends the work for a client that leaves. `run_in_thread` keeps long work away
from the event loop, and `measure_loop_lag` reports by how much the loop is delayed all the same.
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
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeVar

from starlette.types import Receive
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from sensorium.server.http.errors import RETRY_AFTER_S, ApiError, ClientGoneError

logger = logging.getLogger(__name__)
# The size is checked after each read, so that headers may be larger by one read.
MAX_HEAD_BYTES = 2**16
MAX_UNTAKEN_BYTES = 2**20  # of a body, between the connection and its handler
_LOOKS_PER_TIMEOUT = 8
# How many intervals the time between two checks counts at most. If the event loop itself was
# delayed for longer, it has sent nothing in that time.
_MAX_GAP_LOOKS = 2
_LINGER_NOT = struct.pack("ii", 1, 0)  # the C struct linger: on, for 0 seconds
# Two fields of the C struct tcp_info of Linux: tcpi_state, and tcpi_bytes_acked at byte 120.
_TCP_INFO = struct.Struct("=B119xQ")
_ESTABLISHED = 1  # the state TCP_ESTABLISHED: neither side has closed
_LAG_INTERVAL_S = 0.05  # between two measurements of the loop's lag
# Few threads, because each may hold the interpreter's lock, and the event loop waits for them.
_threads = ThreadPoolExecutor(2, "encode")
_Result = TypeVar("_Result")


def _make_response(error: ApiError) -> bytes:
    """Return the bytes of a whole HTTP response with this error, after which the server hangs up.

    It is for connections on which no handler can respond.
    """
    body = error.make_body()
    headers = "".join(f"{name}: {value}\r\n" for name, value in error.headers.items())
    head = (
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        f"{headers}connection: close\r\n\r\n"
    )
    return head.encode() + body


_TOO_LARGE = _make_response(
    ApiError(
        f"the headers may have {MAX_HEAD_BYTES} bytes at most", status=431, code="headers_too_large"
    )
)
_TOO_SLOW = _make_response(
    ApiError("The headers came too slowly. Send the request again.", status=408, code="timeout")
)
_TOO_MANY = _make_response(
    ApiError(
        "This server has too many open connections. Retry later.",
        status=503,
        code="too_many_connections",
        headers={"retry-after": str(RETRY_AFTER_S)},
    )
)


class UnreadWatch:
    """A stopwatch for how long a client has read none of the bytes that wait for it.

    Callers pass the current time in seconds, and the number of bytes that wait.
    """

    def __init__(self, timeout_s: float, *, num_bytes: int, now: float) -> None:
        self.interval_s = timeout_s / _LOOKS_PER_TIMEOUT
        self._timeout_s = timeout_s
        self._num_bytes = num_bytes
        self._looked = now
        self._unread_s = 0.0

    def look(self, now: float, num_bytes: int) -> bool:
        """Return whether the client has read nothing for the whole timeout.

        `num_bytes` is how many bytes wait now. If there are fewer than at the last call, the client
        has read some of them, and the timeout begins anew.
        """
        gap_s = min(now - self._looked, _MAX_GAP_LOOKS * self.interval_s)
        self._unread_s = 0.0 if num_bytes < self._num_bytes else self._unread_s + gap_s
        self._looked, self._num_bytes = now, num_bytes
        return self._unread_s >= self._timeout_s


class LimitedHttpProtocol(HttpToolsProtocol):
    """A uvicorn connection that limits the size and the time of headers, and unread responses.

    Bytes count as headers unless the same read had a part of a body or the end of a request. A
    timer runs while the client has to send a first request, the rest of its headers, or the rest
    of a body that was refused. The connection's buffer of unread data is watched while it is full.
    """

    head_timeout_s = 30.0
    max_connections: int | None = None  # of this process; `None`: no limit
    stream_timeout_s = 60.0  # 0: the buffer is not watched

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._is_understood = False
        self._num_head_bytes = 0
        self._is_in_head = False
        self._is_in_body = False
        self._timer: asyncio.TimerHandle | None = None
        self._next_look: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.max_connections is not None and len(self.connections) > self.max_connections:
            transport.write(_TOO_MANY)
            transport.close()
        else:
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_looking()
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
        """Add a piece of a body to what the handler has not taken yet, and stop reading if full.

        uvicorn would stop at 64 KiB, which is less than one read. Then each read of a large body
        waits for the handler, and a body of 3 MB takes 15 ms instead of 2.
        """
        self._is_understood = True
        if self.cycle.response_complete:
            return
        self.cycle.body += body
        if len(self.cycle.body) > MAX_UNTAKEN_BYTES:
            self.flow.pause_reading()
        self.cycle.message_event.set()

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
        """Whether no request of this connection waits for the end of its response."""
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

    def _look_later(self, watch: UnreadWatch) -> None:
        self._next_look = self.loop.call_later(watch.interval_s, self._look, watch)

    def _look(self, watch: UnreadWatch) -> None:
        if watch.look(self.loop.time(), self._count_unread()):
            logger.info(
                "a client read nothing for %g s: its connection is closed", self.stream_timeout_s
            )
            self._next_look = None
            self._cut_off()
            return
        self._look_later(watch)

    def _count_unread(self) -> int:
        """Return how many bytes the client has not read yet.

        They wait in the connection's buffer and in the kernel's send queue.
        """
        number = self.transport.get_extra_info("socket").fileno()
        return self.transport.get_write_buffer_size() + _count_queued(number)

    def _cut_off(self) -> None:
        """Reset the connection, so that the kernel drops the bytes that the client did not read."""
        number = self.transport.get_extra_info("socket").fileno()
        with socket.socket(fileno=os.dup(number)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
        self.transport.abort()

    def _stop_looking(self) -> None:
        if self._next_look is not None:
            self._next_look.cancel()
            self._next_look = None


class RealtimeProtocol(WebSocketsSansIOProtocol):
    """A uvicorn WebSocket that lets its session end in peace when the server stops.

    uvicorn would close it at once. Instead an event in the scope's state, `draining`, is set, and
    the session closes it when it is done. Another event, `lost`, is set when the connection has
    ended, because a session that reads no messages would not notice. `abort` in the state drops the
    connection and what the client did not read. `hang_up` sends that first, and then ends the
    connection without waiting for the client's close frame.

    A client that sends faster than it is read can't answer a ping in time: the answer waits behind
    all that it has sent. So it counts as alive while it sends. While reading is paused, the kernel
    can't report that the client has left. Then it counts as alive if its machine acknowledges the
    bytes of the ping, and has not closed the connection.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._draining, self._lost = asyncio.Event(), asyncio.Event()
        self._is_heard = False  # something was received since the last ping
        self._num_acknowledged = 0  # bytes, before the last ping

    def handle_connect(self, event: Any) -> None:
        super().handle_connect(event)
        if self.response.status_code == HTTPStatus.SWITCHING_PROTOCOLS:
            state = self.scope["state"]
            state["draining"], state["lost"] = self._draining, self._lost
            state["abort"], state["hang_up"] = self.transport.abort, self.transport.close

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._lost.set()

    def data_received(self, data: bytes) -> None:
        self._is_heard = True
        super().data_received(data)

    def send_keepalive_ping(self) -> None:
        if not self.transport.is_closing():
            self._is_heard = False
            self._num_acknowledged = read_progress(self.transport).num_acknowledged
        super().send_keepalive_ping()

    def keepalive_timeout(self) -> None:
        if self.close_sent or self.transport.is_closing():
            return
        if self._is_heard or (self.read_paused and self._has_taken_ping()):
            self.pong_timer = self.pending_ping_payload = None
            self.schedule_ping()
            return
        super().keepalive_timeout()
        self._lost.set()
        # The connection is closed when all data is written, and this client may never take it.
        self.close_timer = self.loop.call_later(self.close_timeout, self.transport.abort)

    def _has_taken_ping(self) -> bool:
        progress = read_progress(self.transport)
        is_taken = not progress.num_queued or progress.num_acknowledged > self._num_acknowledged
        return progress.is_open and is_taken

    async def send(self, message: Any) -> None:
        if self.close_sent and message["type"] in ("websocket.send", "websocket.close"):
            raise ClientDisconnected  # uvicorn would take it for a mistake of ours
        await super().send(message)
        if self.initial_response is not None and self.close_sent:
            # It was refused with a response. uvicorn 0.54 forgets that this ends the handshake, and
            # would log an error.
            self.handshake_complete = True

    def shutdown(self) -> None:
        if self.handshake_complete and not self.close_sent:
            self._draining.set()
        else:
            super().shutdown()


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpProgress:
    """What the kernel reports about a connection, also while nothing is read from it."""

    is_open: bool  # in both directions
    num_queued: int  # bytes that the client's machine has not acknowledged
    num_acknowledged: int  # bytes, since the connection began


def read_progress(transport: asyncio.Transport) -> TcpProgress:
    """Return what the client's machine has done with the bytes that were sent to it."""
    number = transport.get_extra_info("socket").fileno()
    # uvloop's sockets have no options, so that another object for the same socket is needed.
    with socket.socket(fileno=os.dup(number)) as connection:
        report = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    state, num_acknowledged = _TCP_INFO.unpack(report.ljust(_TCP_INFO.size, b"\0"))
    return TcpProgress(
        is_open=state == _ESTABLISHED,
        num_queued=_count_queued(number),
        num_acknowledged=num_acknowledged,
    )


def _count_queued(number: int) -> int:
    """Return how many bytes wait in the kernel's send queue of the socket with this descriptor."""
    return int.from_bytes(fcntl.ioctl(number, termios.TIOCOUTQ, bytes(4)), sys.byteorder)


def make_http_protocol(
    *, head_timeout_s: float, max_connections: int | None, stream_timeout_s: float
) -> type[LimitedHttpProtocol]:
    """Return a class of HTTP connections with these limits, to be passed to uvicorn.

    If `max_connections` is `None`, their number is not limited. If `stream_timeout_s` is 0, clients
    may leave their responses unread for any time.
    """
    limits = {
        "head_timeout_s": head_timeout_s,
        "max_connections": max_connections,
        "stream_timeout_s": stream_timeout_s,
    }
    return type("HttpProtocol", (LimitedHttpProtocol,), limits)


async def run_in_thread(
    work: Callable[[], _Result], threads: ThreadPoolExecutor = _threads
) -> _Result:
    """Return the result of `work`, which runs in a thread so that it does not delay the event loop.

    If this coroutine is cancelled, it still waits for the end of the work, which may use memory or
    files that the caller would release.
    """
    future = asyncio.get_running_loop().run_in_executor(threads, work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait((future,))
        raise


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Return the result of `work`, or cancel it and raise `ClientGoneError` if the client leaves.

    The request's body must have been received before, because `receive` is read until the client
    disconnects.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def measure_loop_lag(observe: Callable[[float], None]) -> None:
    """Measure by how many seconds the event loop is late, and pass each result to `observe`.

    This goes on until the coroutine is cancelled. A late event loop delays the tokens of streams.
    """
    while True:
        before = time.monotonic()
        await asyncio.sleep(_LAG_INTERVAL_S)
        observe(max(0.0, time.monotonic() - before - _LAG_INTERVAL_S))
