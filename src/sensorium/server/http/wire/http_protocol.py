"""HTTP connections with limits for slow clients, and for clients that don't read responses.

uvicorn's parser keeps a request's line, headers and trailers until they are complete, however long
they become and however slowly they come. Without a limit, one connection could fill the memory, and
many could stay forever, before any handler is called. `LimitedHttpProtocol` limits the size and the
time of headers, and `bodies.intake` those of bodies. A request that wants to become a WebSocket has
no body; one that announces a body is refused before the body comes. An upgrade to another protocol
is ignored. Data is parsed in turns (`turns`), so that a body in chunks of one byte, or many
requests on one connection, delay other connections by only a few milliseconds at a time.

`LimitedHttpProtocol` also ends the connections of clients that don't read their responses. Unread
data waits in the kernel's queue and then in the connection's buffer. When the buffer is full, no
more chunks are made; the engine still generates, and one copy of the text is kept. If a client
takes no byte for the whole timeout, its request ends as if it had disconnected. Any byte that the
client's machine acknowledges counts. The connection's buffer alone would not show these bytes,
because the kernel takes more data only when a large part of its own queue is free again.

A client that leaves ends all its requests: the one that runs, and those that wait behind it. The
connection is read while requests wait, up to limits. Beyond these, the kernel is asked whether the
client has left, which the kernel can't see while the client still has data for which there is no
room.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import struct
from collections import deque
from typing import Any, NoReturn

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from sensorium.server.http.wire.progress import UnreadWatch, count_queued, read_progress
from sensorium.server.http.wire.refusals import (
    INVALID,
    MAX_HEAD_BYTES,
    TOO_LARGE,
    TOO_MANY,
    TOO_SLOW,
    make_handshake_refusal,
)
from sensorium.server.http.wire.request_parser import RequestParser, make_plain_head
from sensorium.server.http.wire.turns import Allowance, Turns

logger = logging.getLogger(__name__)
MAX_UNTAKEN_BYTES = 2**20  # of bodies, between the connection and their handlers
_LINGER_NOT = struct.pack("ii", 1, 0)  # the C struct linger: on, for 0 seconds
_LENGTH = b"content-length"
_OF_BODIES = frozenset((_LENGTH, b"transfer-encoding"))
_OF_HANDSHAKES = re.compile(rb"connection|upgrade|sec-websocket-.*")
_PORTION_BYTES = 2**12  # to the parser at once, or the rest of a body with a known length
_MAX_PIPELINED = 16  # requests that wait behind another one before reading stops
_PEER_LOOK_S = 0.25  # between two checks whether a client with waiting requests has left
# Chunks of bodies. One takes a microsecond.
_MAX_CHUNKS = 2**13
_CHUNKS_PER_S = 2**11


class _RefusedError(Exception):
    """An exception that stops the parser at a request that is refused."""


class _Flow(FlowControl):
    """uvicorn's flow control, which lets `Turns` decide whether the transport reads.

    uvicorn calls `pause_reading` for each request that waits behind another one. Here it does
    nothing, because a transport that does not read can't notice that its client leaves; `Turns`
    stops reading when too many requests wait. `hold` stops it for bodies that no handler has taken.
    """

    def __init__(self, transport: asyncio.Transport, turns: Turns) -> None:
        super().__init__(transport)
        self._turns = turns

    def pause_reading(self) -> None:
        pass

    def hold(self) -> None:
        super().pause_reading()

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            self._turns.go_on()


class LimitedHttpProtocol(HttpToolsProtocol):
    """A uvicorn connection that limits the size and the time of headers, and unread responses.

    Bytes count as headers unless the same portion had a part of a body or the end of a request. A
    timer runs while the client has to send a first request, the rest of its headers, or the rest of
    a body that was refused.
    """

    head_timeout_s = 30.0
    max_connections: int | None = None  # of this process; `None`: no limit
    stream_timeout_s = 60.0  # 0: the buffer is not watched

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.parser: RequestParser = RequestParser(self, self._take_plain_head)
        self._plain_head: bytes | None = None  # of a request with an upgrade that is ignored
        self._is_understood = False
        self._num_head_bytes = 0
        self._is_in_head = False
        self._is_in_body = False
        self._is_upgrade = False  # the request wants to become a WebSocket
        self._refusal = INVALID  # the response to what stops the parser
        self._timer: asyncio.TimerHandle | None = None
        self._next_look: asyncio.TimerHandle | None = None
        # The request that runs, and those that wait behind it.
        self._unanswered: deque[RequestResponseCycle] = deque()
        self._next_peer_look: asyncio.TimerHandle | None = None
        self._num_expected: int | None = None  # bytes of the body; `None`: its length is not known
        self._turns = Turns(
            self.loop,
            parse=self._parse,
            is_held=lambda: self.flow.read_paused or len(self.pipeline) > _MAX_PIPELINED,
            get_size=lambda: max(_PORTION_BYTES, self._num_expected or 0),
            pieces=Allowance(_MAX_CHUNKS, per_s=_CHUNKS_PER_S, now=self.loop.time()),
        )

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._turns.transport = transport
        self.flow: _Flow = _Flow(transport, self._turns)
        if self.max_connections is not None and len(self.connections) > self.max_connections:
            transport.write(TOO_MANY)
            transport.close()
        else:
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_looking()
        if self._next_peer_look is not None:
            self._next_peer_look.cancel()
        self.pipeline.clear()
        for cycle in self._unanswered:  # uvicorn has the newest only
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)
        self._turns.drop()

    def data_received(self, data: bytes) -> None:
        self._turns.add(data)

    def _parse(self, data: bytes) -> None:
        self._is_understood = False
        super().data_received(data)
        self._num_head_bytes = 0 if self._is_understood else self._num_head_bytes + len(data)
        if self.transport.is_closing():
            return
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self._end_with(TOO_LARGE)
        elif self._timer is None and (self._is_in_head or self._is_idle):
            self._start_timer()

    def on_message_begin(self) -> None:
        self._is_in_head = True
        self._is_upgrade = False
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_upgrade = self.parser.should_upgrade() and self._should_upgrade()
        if self._is_upgrade:
            self._check_upgrade()
            return  # the timer runs until a WebSocket takes the connection over
        if self.parser.should_upgrade():
            self._plain_head = make_plain_head(
                self.parser.get_method(), self.url, self.parser.get_http_version(), self.headers
            )
            if self._plain_head is not None:
                return  # this method is called once more, for that head
        self._stop_timer()
        self._is_in_head = False
        lengths = [int(value) for name, value in self.headers if name == _LENGTH]
        self._num_expected = lengths[0] if lengths else None
        super().on_headers_complete()
        self._is_in_body = True
        self._unanswered.append(self.cycle)
        if self.pipeline and self._next_peer_look is None:
            self._look_at_peer_later()

    def _take_plain_head(self) -> bytes | None:
        head, self._plain_head = self._plain_head, None
        return head

    def _check_upgrade(self) -> None:
        """Refuse a handshake that the WebSocket could not read, or would never receive."""
        self.scope["method"] = self.parser.get_method().decode("ascii")
        if any(name in _OF_BODIES for name, _ in self.headers):
            self._refuse("it has no body")
        for name, value in self.headers:
            if _OF_HANDSHAKES.fullmatch(name) and not value.isascii():  # `websockets` would fail
                self._refuse(f"its header {name.decode()} has characters that are not ASCII")
        if not self._is_answered:
            self._refuse("it does not come before the answer to another request")

    def _refuse(self, rule: str) -> NoReturn:
        self._refusal = make_handshake_refusal(rule)
        raise _RefusedError

    def handle_websocket_upgrade(self) -> None:
        self._stop_timer()
        self._stop_looking()
        self._is_in_head = False
        super().handle_websocket_upgrade()
        self._turns.drop()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - `_refusal` says more
        self._end_with(self._refusal)

    def _end_with(self, response: bytes) -> None:
        """Close the connection, and send this response to the request that is not complete yet.

        The response is not sent if that request already has one, or if an earlier request waits for
        its own.
        """
        if self._is_in_body and len(self._unanswered) == 1 and not self.cycle.response_started:
            self.cycle.disconnected = True  # its handler can send nothing more
            self.cycle.message_event.set()
            self.transport.write(response)
        elif not self._is_in_body and self._is_answered:
            self.transport.write(response)
        self.transport.close()

    def on_body(self, body: bytes) -> None:
        """Keep a piece of a body until a handler takes it, and stop reading if too much is kept.

        uvicorn would stop at 64 KiB, less than one read, and each read of a large body would wait
        for the handler: 15 ms for 3 MB, instead of 2. `MAX_UNTAKEN_BYTES` is for all requests that
        wait.
        """
        self._is_understood = True
        if self._num_expected is None:
            self._turns.count_piece()
        else:
            self._num_expected -= len(body)
        if self.cycle.response_complete:
            return
        self.cycle.body += body
        if sum(len(cycle.body) for cycle in self._unanswered) > MAX_UNTAKEN_BYTES:
            self.flow.hold()
        self.cycle.message_event.set()

    def on_message_complete(self) -> None:
        if self._plain_head is not None:
            return
        self._is_understood = True
        self._num_expected = None
        if self._is_upgrade:
            return
        self._is_in_body = False
        self._stop_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._unanswered.popleft()
        super().on_response_complete()
        self._turns.go_on()
        if self._is_in_body and self._timer is None:
            self._start_timer()  # the rest is discarded, but must come in time

    @property
    def _is_answered(self) -> bool:
        """Return whether no request waits for the end of its response."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def _is_idle(self) -> bool:
        """Return whether the client could idle forever: a line break stops uvicorn's timeout."""
        has_timeout = self.timeout_keep_alive_task is not None or self._is_upgrade
        return self._is_answered and not has_timeout

    def _look_at_peer_later(self) -> None:
        self._next_peer_look = self.loop.call_later(_PEER_LOOK_S, self._look_at_peer)

    def _look_at_peer(self) -> None:
        """Close the connection if the client has left while its requests wait, else look again."""
        self._next_peer_look = None
        if not self.pipeline or self.transport.is_closing():
            return
        if read_progress(self.transport).is_open:
            self._look_at_peer_later()
        else:
            self.transport.close()

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
            self.transport.write(TOO_SLOW)
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
        """Return how many bytes wait in the connection's buffer and the kernel's send queue."""
        number = self.transport.get_extra_info("socket").fileno()
        return self.transport.get_write_buffer_size() + count_queued(number)

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


def make_http_protocol(
    *, head_timeout_s: float, max_connections: int | None, stream_timeout_s: float
) -> type[LimitedHttpProtocol]:
    """Return a class of HTTP connections with these limits, to be passed to uvicorn."""
    limits = {
        "head_timeout_s": head_timeout_s,
        "max_connections": max_connections,
        "stream_timeout_s": stream_timeout_s,
    }
    return type("HttpProtocol", (LimitedHttpProtocol,), limits)
