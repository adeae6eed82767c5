"""Connections of WebSockets: which handshakes are refused, and how connections live and end."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import SecurityError
from websockets.http11 import MAX_LINE_LENGTH, MAX_NUM_HEADERS

from sensorium.server.http.wire.progress import read_progress
from sensorium.server.http.wire.refusals import make_handshake_refusal

_TOO_LARGE = make_handshake_refusal(
    f"its address and each of its headers have {MAX_LINE_LENGTH} bytes at most, and there are "
    f"{MAX_NUM_HEADERS} headers at most",
    status=HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
)
_MAX_WORDS = 200  # characters of a reason, which may quote the client


class RealtimeProtocol(WebSocketsSansIOProtocol):
    """A uvicorn WebSocket that lets its session end in peace when the server stops.

    A handshake that the library can't parse is refused at once. uvicorn would not notice it, and
    keep the connection for ever.

    When the server stops, uvicorn would close it at once. Instead an event in the scope's state,
    `draining`, is set, and the session closes it when it is done. Another event, `lost`, is set
    when the connection has ended, because a session that reads no messages would not notice.
    `abort` in the state drops the connection and what the client did not read. `hang_up` sends that
    first, and then ends the connection without waiting for the client's close frame.

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
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            self._refuse(self.conn.handshake_exc.__cause__)

    def _refuse(self, reason: BaseException | None) -> None:
        """Answer a handshake that the library could not parse, and close the connection."""
        is_large = isinstance(reason, SecurityError)
        words = str(reason or "it is not understood")[:_MAX_WORDS]
        self.handshake_complete = self.close_sent = True  # there is nothing to wait for
        self.transport.write(_TOO_LARGE if is_large else make_handshake_refusal(words))
        self.transport.close()

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
