"""Clients that vanish while the server does not read them are noticed by their pings."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState
from websockets.protocol import State

from sensorium.server.http.wire import websocket_protocol
from sensorium.server.http.wire.progress import TcpProgress
from sensorium.server.http.wire.websocket_protocol import RealtimeProtocol
from tests.support.talking import LOUD, QUIET, make_tones, to_pcm16
from tests.support.waiting import wait_until
from tests.unit.server.http.realtime.clients import (
    get_ends,
    make_frame,
    open_raw,
    wait_until_empty,
)
from tests.unit.server.http.wire.clockwork import FakeLoop, FakeTransport
from tests.unit.server.standing_in import RunningServer
from tests.unit.server.transcribing import ScriptedTranscriber

PING_S = 20.0
CLOSE_S = 10.0  # after which a connection is dropped that does not take its close frame
RESET = struct.pack("ii", 1, 0)  # the C struct linger: closing resets the connection
TURN = to_pcm16(make_tones((LOUD, 9.0), (QUIET, 1.0)))
FRAME = make_frame(
    json.dumps({"type": "input_audio_buffer.append", "audio": base64.b64encode(TURN).decode()})
)


def fill(raw: socket.socket) -> None:
    """Send audio until the server reads no more."""
    raw.recv(1, socket.MSG_PEEK)  # uvicorn would lose a frame that comes with the handshake
    raw.settimeout(2.0)
    with suppress(TimeoutError):
        for _ in range(1000):
            raw.sendall(FRAME)
    raw.settimeout(None)


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_client_that_vanishes_while_it_is_not_read_is_noticed(
    make_server: Callable[..., RunningServer], transcriber: ScriptedTranscriber, is_reset: bool
) -> None:
    transcriber.between = lambda _: asyncio.sleep(3600)
    server = make_server(ping_s=0.3, realtime_idle_timeout=0.0)
    with open_raw(server) as raw:
        fill(raw)
        assert server.metrics.num_websockets == 1
        if is_reset:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    wait_until_empty(server, transcriber)
    assert transcriber.num_aborted == 1
    assert get_ends(server, "client") == 1


def test_a_client_that_takes_no_ping_while_it_is_not_read_is_closed(
    make_server: Callable[..., RunningServer],
    transcriber: ScriptedTranscriber,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if the cable was cut: the kernel still sends, and nothing is acknowledged."""
    transcriber.between = lambda _: asyncio.sleep(3600)
    server = make_server(ping_s=0.3, realtime_idle_timeout=0.0)
    with open_raw(server) as raw:
        fill(raw)
        wait_until(lambda: transcriber.num_open == 1, "it is being transcribed")
        silent = TcpProgress(is_open=True, num_queued=6, num_acknowledged=1000)
        monkeypatch.setattr(websocket_protocol, "read_progress", lambda _: silent)
        wait_until_empty(server, transcriber)


# ---- by a clock that the test turns


class Client:
    """What the kernel reports about a client: it takes all pings until it vanishes."""

    def __init__(self, transport: FakeTransport) -> None:
        self._transport = transport
        self._num_taken: int | None = None  # `None`: all
        self._is_open = True
        self.num_in_flight = 0

    def vanish(self, *, is_open: bool) -> None:
        self._num_taken, self._is_open = len(self._transport.written), is_open

    def read_progress(self, _: Any) -> TcpProgress:
        num_written = len(self._transport.written)
        num_taken = num_written - self.num_in_flight if self._num_taken is None else self._num_taken
        return TcpProgress(
            is_open=self._is_open, num_queued=num_written - num_taken, num_acknowledged=num_taken
        )


@contextmanager
def making_paused(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[tuple[FakeLoop, FakeTransport, Client]]:
    """Make an open connection from which the server does not read."""
    config = uvicorn.Config(
        lambda: None, ws_ping_interval=PING_S, ws_ping_timeout=PING_S, log_config=None
    )
    config.load()
    loop = FakeLoop()
    transport = FakeTransport(loop)
    client = Client(transport)
    monkeypatch.setattr(websocket_protocol, "read_progress", client.read_progress)
    protocol = RealtimeProtocol(config, ServerState(), {}, loop)
    protocol.transport = transport  # type: ignore[assignment]
    protocol.conn.state = State.OPEN
    protocol.handshake_complete = protocol.read_paused = True
    protocol.start_keepalive()
    yield loop, transport, client


def test_a_client_that_is_not_read_for_an_hour_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    with making_paused(monkeypatch) as (loop, transport, client):
        loop.run_until(1800.0)
        client.num_in_flight = 3  # a little more is always on its way
        loop.run_until(3600.0)
        assert transport.closed is None
        assert len(transport.written) >= 3600 / (2 * PING_S) * 6


@pytest.mark.parametrize("is_open", [True, False])
def test_a_client_that_vanishes_is_noticed_after_its_next_ping(
    monkeypatch: pytest.MonkeyPatch, is_open: bool
) -> None:
    for after_s in (0.0, 5.0, 19.0, 21.0, 39.0):
        with making_paused(monkeypatch) as (loop, transport, client):
            vanished = 400.0 + after_s
            loop.run_until(vanished)
            client.vanish(is_open=is_open)
            loop.run_until(vanished + 4 * PING_S)
            assert transport.closed is not None
            # It may have taken the ping before; then the next one has to time out.
            assert transport.closed - vanished <= 3 * PING_S
            assert b"keepalive ping timeout" in transport.written
            assert transport.aborted == transport.closed + CLOSE_S
