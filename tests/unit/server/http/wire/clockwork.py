"""An event loop and a transport that a test turns by hand, and connections over them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from sensorium.server.http.wire.http_protocol import LimitedHttpProtocol
from sensorium.server.http.wire.websocket_protocol import LimitedWebSocket

HANDSHAKE = (
    b"GET /v1/realtime HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\n"
    b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


class FakeLoop:
    """A clock with timers, in place of an event loop. Its tasks never run."""

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[tuple[float, FakeTimer]] = []

    def time(self) -> float:
        return self.now

    def call_later(self, delay_s: float, call: Callable[..., None], *given: Any) -> FakeTimer:
        timer = FakeTimer(lambda: call(*given))
        self._timers.append((self.now + delay_s, timer))
        return timer

    def create_task(self, work: Coroutine[Any, Any, None]) -> FakeTimer:
        work.close()
        return FakeTimer(lambda: None)

    def run_turn(self) -> bool:
        """Run what is due next, but nothing that it starts. Return False if there is nothing."""
        if not self._timers:
            return False
        self.now = max(self.now, min(when for when, _ in self._timers))
        due = [timer for when, timer in self._timers if when <= self.now]
        self._timers = [entry for entry in self._timers if entry[0] > self.now]
        for timer in due:
            timer.run()
        return True

    def run_until(self, end: float) -> None:
        while due := [entry for entry in self._timers if entry[0] <= end]:
            first = min(due, key=lambda entry: entry[0])
            self._timers.remove(first)
            self.now = first[0]
            first[1].run()
        self.now = end


class FakeTimer:
    """A timer, or a task, that does nothing once it is cancelled."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self._call = None

    def run(self) -> None:
        if self._call is not None:
            self._call()

    def add_done_callback(self, _: Any) -> None:
        pass


class FakeTransport:
    """A transport that notes what was written, whether it reads, and when it was closed."""

    def __init__(self, loop: FakeLoop) -> None:
        self._loop = loop
        self.written = b""
        self.is_reading = True
        self.closed: float | None = None
        self.aborted: float | None = None

    def get_extra_info(self, _: str) -> None:
        return None

    def pause_reading(self) -> None:
        if self.is_closing():
            raise RuntimeError("uvloop refuses this after the end")
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True

    def write(self, data: bytes) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closed is not None

    def close(self) -> None:
        self.closed = self._loop.now

    def abort(self) -> None:
        self.aborted = self._loop.now


class Line:
    """A connection over a fake transport, and how many bytes its parser was given each time."""

    def __init__(self, kind: type[LimitedHttpProtocol] | type[LimitedWebSocket]) -> None:
        config = uvicorn.Config(lambda: None, log_config=None, ws_per_message_deflate=False)
        config.load()
        self.loop = FakeLoop()
        self.transport = FakeTransport(self.loop)
        self.protocol: Any = kind(config, ServerState(), {}, self.loop)  # type: ignore[arg-type]
        self.protocol.connection_made(self.transport)
        self.given: list[int] = []

    def note_bytes(self, parse: Callable[[bytes], None]) -> Callable[[bytes], None]:
        """Return a function that notes the size of what it is given, and calls `parse` with it."""

        def note(data: bytes) -> None:
            self.given.append(len(data))
            parse(data)

        return note


def open_http() -> Line:
    line = Line(LimitedHttpProtocol)
    feed = line.note_bytes(line.protocol.parser.feed_data)

    class Parser:
        """Wraps the connection's parser, as its methods can't be replaced."""

        feed_data = staticmethod(feed)

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    real = line.protocol.parser
    line.protocol.parser = Parser()
    return line


def open_websocket() -> Line:
    """Return a WebSocket that was accepted."""
    line = Line(LimitedWebSocket)
    conn = line.protocol.conn
    conn.receive_data(HANDSHAKE)
    (request,) = conn.events_received()
    conn.send_response(conn.accept(request))
    conn.data_to_send()
    line.protocol.handshake_initiated = line.protocol.handshake_complete = True
    conn.receive_data = line.note_bytes(conn.receive_data)
    return line
