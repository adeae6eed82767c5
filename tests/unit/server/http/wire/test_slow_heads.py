"""Connections that don't send a whole head are closed; those that wait for an answer are not."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from sensorium.server.http.wire.http_protocol import make_http_protocol
from tests.unit.server.standing_in import RunningServer, ScriptedEngine, read_answer, serve

HEAD = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
BODY = '{"prompt": "a"}'
REQUEST = f"{HEAD}content-length: {len(BODY)}\r\n\r\n{BODY}"
SOON = make_http_protocol(head_timeout_s=0.5, max_connections=None, stream_timeout_s=0.0)


def send(running: RunningServer, content: str) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", running.port), timeout=60)
    connection.sendall(content.encode())
    return connection


def read_to_the_end(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65536), b""))


def test_a_silent_connection_is_closed_without_a_word() -> None:
    with serve(http=SOON) as running, send(running, "") as connection:
        assert read_to_the_end(connection) == b""


@pytest.mark.parametrize("beginning", ["", REQUEST], ids=["first", "after another"])
def test_half_a_head_is_answered_and_closed(beginning: str) -> None:
    with serve(http=SOON) as running, send(running, beginning) as connection:
        if beginning:
            assert b"200 OK" in read_answer(connection)
        connection.sendall(HEAD.encode())
        answer = read_to_the_end(connection)
        assert b"HTTP/1.1 408 Request Timeout\r\n" in answer
        assert b'"code":"timeout"' in answer


def test_the_rest_of_a_refused_body_is_not_awaited_for_ever() -> None:
    head = f"{HEAD}content-length: 99999999\r\n\r\n{{"
    with serve(http=SOON, max_body_mb=1) as running, send(running, head) as connection:
        assert read_to_the_end(connection).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("rest", ["\r\n", "\r", "\n"])
def test_line_breaks_after_a_request_do_not_hold_the_connection(rest: str) -> None:
    with serve(http=SOON) as running, send(running, REQUEST) as connection:
        assert b"200 OK" in read_answer(connection)
        connection.sendall(rest.encode())
        connection.settimeout(10)
        assert read_to_the_end(connection) == b""


def test_a_refused_body_that_ends_does_not_hold_the_connection() -> None:
    size = 2**21
    head = f"{HEAD}content-length: {size}\r\n\r\n"
    with serve(http=SOON, max_body_mb=1) as running, send(running, head) as connection:
        assert read_answer(connection).startswith(b"HTTP/1.1 413")
        connection.sendall(b" " * size)
        connection.settimeout(10)
        assert read_to_the_end(connection) == b""


def test_an_answer_that_takes_long_is_not_cut_off() -> None:
    """Nor is one behind which the head of another request has begun."""

    async def wait(_: Any) -> None:
        await asyncio.sleep(2.5)  # five times the time for a head

    with serve(ScriptedEngine(prepare=wait), http=SOON) as running:
        with send(running, REQUEST) as connection:
            assert b"200 OK" in connection.recv(65536)
        with send(running, REQUEST + "POST ") as connection:
            answer = read_to_the_end(connection)
            assert answer.count(b"HTTP/1.1 200 OK") == 1
            assert answer.count(b'"finish_reason":"stop"') == 1


def test_a_connection_beyond_the_limit_gets_retry_after() -> None:
    few = make_http_protocol(head_timeout_s=60.0, max_connections=2, stream_timeout_s=0.0)
    with (
        serve(http=few) as running,
        send(running, REQUEST) as first,
        send(running, REQUEST) as second,
    ):
        assert b"200 OK" in first.recv(65536)
        assert b"200 OK" in second.recv(65536)
        with send(running, "") as third:
            answer = read_to_the_end(third)
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 1\r\n" in answer
