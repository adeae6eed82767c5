"""A client that leaves ends all its requests, also while others wait behind the one that runs."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from typing import Any

import pytest

from sensorium.server.http.wire.http_protocol import make_http_protocol
from tests.support.waiting import wait_until
from tests.unit.server.standing_in import ScriptedEngine, serve

PATIENT = make_http_protocol(head_timeout_s=3600.0, max_connections=None, stream_timeout_s=0.0)


def make(*, num_bytes: int = 0, stream: bool = False) -> bytes:
    """Return a request with so many bytes more in its body than it needs."""
    body = b'{"prompt": "hi", "stream": %s}' % (b"true" if stream else b"false") + b" " * num_bytes
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize("is_reset", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize(
    ("first", "behind"),
    [
        pytest.param(make(), make(), id="answer"),
        pytest.param(make(stream=True), make(), id="stream"),
        pytest.param(make(), make() * 40, id="many behind"),
        pytest.param(make(), make(num_bytes=2**20 + 2**15), id="large behind"),
    ],
)
@pytest.mark.parametrize("is_at_once", [True, False], ids=["at once", "later"])
def test_a_client_that_leaves_ends_all_its_waiting_requests(
    first: bytes, behind: bytes, is_at_once: bool, is_reset: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)

    async def wait(_: Any) -> None:
        await asyncio.sleep(3600.0)

    engine = ScriptedEngine(prepare=wait)
    with serve(engine, http=PATIENT) as running:
        with socket.create_connection(("127.0.0.1", running.port), timeout=60) as connection:
            connection.sendall(first + behind if is_at_once else first)
            wait_until(lambda: engine.num_open == 1, "the first request runs")
            if not is_at_once:
                connection.sendall(behind)
            if is_reset:
                never = struct.pack("ii", 1, 0)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, never)
        wait_until(lambda: engine.num_aborted == 1, "the first request ends", timeout_s=20.0)
    assert (engine.num_started, engine.num_open) == (1, 0)
    assert not caplog.records


def test_requests_that_wait_are_all_answered_in_turn() -> None:
    behind = make() * 40 + make(num_bytes=2**21) + make(stream=True)
    with (
        serve(http=PATIENT) as running,
        socket.create_connection(("127.0.0.1", running.port), timeout=60) as connection,
    ):
        connection.sendall(make() + behind)
        answer = b""
        while not answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            answer += connection.recv(65536)
    assert answer.count(b"HTTP/1.1 200 OK") == 43
    assert answer.count(b"text/event-stream") == 1
