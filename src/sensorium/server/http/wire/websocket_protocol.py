"""WebSocket connections that limit small frames and find out whether their client is alive.

The parser of the library `websockets` takes some microseconds for each frame, however small. So
frames are parsed in turns (`turns`), and small ones are limited: the fragments of a message, and
the control frames of a connection. A message that waits for its handler holds back the data behind
it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import SecurityError
from websockets.frames import CloseCode
from websockets.http11 import MAX_LINE_LENGTH, MAX_NUM_HEADERS

from sensorium.server.http.errors import ApiError
from sensorium.server.http.wire.progress import read_progress
from sensorium.server.http.wire.refusals import make_handshake_refusal, make_response
from sensorium.server.http.wire.turns import Allowance, Turns

logger = logging.getLogger(__name__)
MAX_FRAGMENTS = 2**12  # of one message; the portion that reaches this may add more
MAX_CONTROL_FRAMES = 600  # at once
CONTROL_FRAMES_PER_S = 10  # more
_PORTION_BYTES = 2**10  # to the parser at once: up to 170 frames
# Fragments and control frames. One takes five microseconds.
_MAX_PIECES = 2**12
_PIECES_PER_S = 2**9
_TOO_LARGE = make_handshake_refusal(
    f"its address and each of its headers have {MAX_LINE_LENGTH} bytes at most, and there are "
    f"{MAX_NUM_HEADERS} headers at most",
    status=HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
)
_FAILED = make_response(
    ApiError("The server failed on this handshake.", status=500, reason="internal", is_bug=True)
)
_MAX_WORDS = 200  # characters of a reason, which may quote the client
_HOLD_S = 1.0  # for which a connection that broke a limit or the protocol lives on, unread


class LimitedWebSocket(WebSocketsSansIOProtocol):
    """A uvicorn WebSocket that costs other connections little, whatever its client sends.

    A handshake that the library can't parse is refused at once. uvicorn would not notice it and
    would keep the connection forever. A client that breaks a limit gets a close frame with its
    reason: 1009 for too many fragments, 1008 for too many control frames, 1007 for text that is no
    UTF-8. Its connection stays open a moment longer, but is not read: a client that connects again
    at once would else take as much of the server as without a limit. Also, data that the client
    still sends would be answered by a reset, which might make it lose the close frame.

    A client that sends faster than the server reads can't answer a ping in time, because the answer
    waits behind its data. So it counts as alive while it sends. While reading is paused, the kernel
    can't report that the client has left. Then the client counts as alive if its machine
    acknowledges the bytes of the ping, and has not closed the connection.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._has_failed = False  # it is not read any more
        self._is_taken = False  # something was received since the last ping
        self._num_acknowledged = 0  # bytes, before the last ping
        now = self.loop.time()
        self._num_control = 0  # frames, of this portion
        self._control = Allowance(MAX_CONTROL_FRAMES, per_s=CONTROL_FRAMES_PER_S, now=now)
        self._turns = Turns(
            self.loop,
            parse=self._parse,
            is_held=lambda: self.read_paused or self._has_failed,
            get_size=lambda: _PORTION_BYTES,
            pieces=Allowance(_MAX_PIECES, per_s=_PIECES_PER_S, now=now),
        )

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._turns.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._turns.drop()

    # ---- what the client sends

    def data_received(self, data: bytes) -> None:
        if self.handshake_initiated:
            self._turns.add(data)
            return
        try:
            super().data_received(data)  # the whole head, from the HTTP connection before this one
        except Exception:  # a bug; the transport does not know this protocol yet, and would leak it
            logger.exception("a handshake could not be answered")
            self._end(_FAILED)
            return
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            self._refuse(self.conn.handshake_exc.__cause__)

    def _refuse(self, reason: BaseException | None) -> None:
        """Answer a handshake that the library could not parse, and close the connection."""
        is_large = isinstance(reason, SecurityError)
        words = str(reason or "it is not understood")[:_MAX_WORDS]
        self._end(_TOO_LARGE if is_large else make_handshake_refusal(words))

    def _end(self, response: bytes) -> None:
        self.handshake_complete = self.close_sent = True  # there is nothing to wait for
        self.transport.write(response)
        self.transport.close()

    def _parse(self, data: bytes) -> None:
        self._is_taken = True
        self._num_control = 0
        super().data_received(data)
        if len(self.frames) > MAX_FRAGMENTS:
            self._fail(
                CloseCode.MESSAGE_TOO_BIG, f"a message has {MAX_FRAGMENTS} fragments at most"
            )
        elif self._control.take(self._num_control, self.loop.time()):
            self._fail(CloseCode.POLICY_VIOLATION, "too many pings and pongs")

    def _fail(self, code: CloseCode, reason: str) -> None:
        """Close the connection as after an invalid frame; the handler gets the close code."""
        if not (self._has_failed or self.transport.is_closing()):
            self.conn.fail(code, reason)
            self.handle_parser_exception()

    def handle_parser_exception(self) -> None:
        sent = self.conn.close_sent
        if sent is None:  # it was not accepted yet, so there are no close frames
            self._close()
            return
        self.queue.put_nowait(
            {"type": "websocket.disconnect", "code": sent.code, "reason": sent.reason}
        )
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = self._has_failed = True
        self._turns.drop()
        if not self.transport.is_closing():  # the client may have left meanwhile
            self.transport.pause_reading()
        self._set_timer(_HOLD_S, self._close)

    def _close(self) -> None:
        self.transport.close()
        self._abort_later()

    def _abort_later(self) -> None:
        """Drop the connection if its client does not take what was written before it was closed."""
        self._set_timer(self.close_timeout, self.transport.abort)

    def _set_timer(self, delay_s: float, end: Callable[[], None]) -> None:
        if self.close_timer is not None:
            self.close_timer.cancel()
        self.close_timer = self.loop.call_later(delay_s, end)

    def send_receive_event_to_app(self) -> None:
        """Pass a message to the handler; text that is not valid UTF-8 fails the connection instead.

        uvicorn would log such text with a traceback.
        """
        if self.curr_msg_data_type == "text" and not self.close_sent:
            text = self.frames[0] if len(self.frames) == 1 else b"".join(self.frames)
            self.frames = [text]
            try:
                if not text.isascii():  # most texts are ASCII, and that is cheaper to check
                    text.decode()
            except UnicodeDecodeError as error:
                self.frames = []
                self._fail(CloseCode.INVALID_DATA, f"{error.reason} at position {error.start}")
                return
        super().send_receive_event_to_app()

    def handle_cont(self, event: Any) -> None:
        self._turns.count_piece()
        super().handle_cont(event)

    def handle_ping(self) -> None:
        self._count_control()
        super().handle_ping()

    def handle_pong(self, event: Any) -> None:
        self._count_control()
        super().handle_pong(event)

    def _count_control(self) -> None:
        self._turns.count_piece()
        self._num_control += 1

    async def receive(self) -> Any:
        if not self.queue.empty():
            # Many small messages may have come in one portion. Other tasks get a turn between them.
            await asyncio.sleep(0)
        message = await super().receive()
        if not self.read_paused and not self.disconnected:
            self._turns.go_on()
        return message

    # ---- whether the client is alive

    def send_keepalive_ping(self) -> None:
        if not self.transport.is_closing():
            self._is_taken = False
            self._num_acknowledged = read_progress(self.transport).num_acknowledged
        super().send_keepalive_ping()

    def keepalive_timeout(self) -> None:
        if self.close_sent or self.transport.is_closing():
            return
        is_paused = self.read_paused or self._turns.has_rest
        if self._is_taken or (is_paused and self._has_taken_ping()):
            self.pong_timer = self.pending_ping_payload = None
            self.schedule_ping()
            return
        super().keepalive_timeout()
        self._abort_later()

    def _has_taken_ping(self) -> bool:
        progress = read_progress(self.transport)
        is_taken = not progress.num_queued or progress.num_acknowledged > self._num_acknowledged
        return progress.is_open and is_taken

    # ---- what the handler sends

    async def send(self, message: Any) -> None:
        if self.close_sent and message["type"] in ("websocket.send", "websocket.close"):
            raise ClientDisconnected  # uvicorn would treat it as a mistake of ours
        await super().send(message)
        if self._turns.has_rest:
            self._turns.go_on()  # a close frame ends the wait for the handler
        if self.initial_response is not None and self.close_sent:
            # It was refused with a response. uvicorn 0.54 forgets that this ends the handshake, and
            # would log an error.
            self.handshake_complete = True


class RealtimeProtocol(LimitedWebSocket):
    """A WebSocket that lets its live session end by itself when the server stops.

    uvicorn would close it at once. Here the event `draining` in the scope's state is set, and the
    session closes the WebSocket when it is done. The event `lost` is set when the connection has
    ended, because a session that reads no messages would not notice. `abort` in the state drops the
    connection and unread data. `hang_up` sends that data first, but does not wait for the client's
    close frame.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._draining, self._lost = asyncio.Event(), asyncio.Event()

    def handle_connect(self, event: Any) -> None:
        super().handle_connect(event)
        if self.response.status_code == HTTPStatus.SWITCHING_PROTOCOLS:
            state = self.scope["state"]
            state["draining"], state["lost"] = self._draining, self._lost
            state["abort"], state["hang_up"] = self.transport.abort, self.transport.close

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._lost.set()

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        if self.close_sent:
            self._lost.set()

    def shutdown(self) -> None:
        if self.handshake_complete and not self.close_sent:
            self._draining.set()
        else:
            super().shutdown()
