"""Handshakes of WebSockets that can't be taken are answered at once, and their connections end."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sensorium.server.http.wire.http_protocol import make_http_protocol
from sensorium.server.http.wire.websocket_protocol import LimitedWebSocket
from tests.support.waiting import wait_until
from tests.unit.server.standing_in import RunningServer, read_answer, serve

# So long that an answer does not come from a timer.
PATIENT = make_http_protocol(head_timeout_s=3600.0, max_connections=None, stream_timeout_s=0.0)
SOON = make_http_protocol(head_timeout_s=0.5, max_connections=None, stream_timeout_s=0.0)
WANTED = (
    b"Host: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)
REQUEST = b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n"
LARGE = b"a" * 9000


def make(line: bytes = b"GET /v1/realtime", headers: bytes = b"") -> bytes:
    return line + b" HTTP/1.1\r\n" + WANTED + headers + b"\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serve(http=PATIENT) as running:
        yield running


def open_to(server: RunningServer, content: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=120)
    connection.sendall(content)
    return connection


def read_to_the_end(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.parametrize(
    ("content", "status", "words"),
    [
        pytest.param(make(b"POST /v1/realtime"), 400, "GET", id="POST"),
        pytest.param(make(b"DELETE /nowhere"), 400, "GET", id="DELETE"),
        pytest.param(make(headers=b"Content-Length: 5\r\n"), 400, "no body", id="body to come"),
        pytest.param(make(headers=b"Content-Length: 5\r\n") + b"12345", 400, "no body", id="body"),
        pytest.param(make(headers=b"Content-Length: 0\r\n"), 400, "no body", id="empty body"),
        pytest.param(
            make(headers=b"Transfer-Encoding: chunked\r\n"), 400, "no body", id="chunks to come"
        ),
        pytest.param(
            make(b"POST /v1/realtime", b"Content-Length: 5\r\n"), 400, "no body", id="POST, body"
        ),
        pytest.param(make(headers=b"x-a: " + LARGE + b"\r\n"), 431, "8192 bytes", id="header"),
        pytest.param(make(b"GET /v1/realtime?model=" + LARGE), 431, "8192 bytes", id="query"),
        pytest.param(make(headers=b"x-a: 1\r\n" * 200), 431, "128 headers", id="many headers"),
        pytest.param(make(b"GET /v1/realtime?model=\xc3\xa4"), 400, "valid HTTP", id="address"),
        pytest.param(
            make().replace(b"Connection: Upgrade", b"Connection: Upgrade, \xff"),
            *(400, "not ASCII"),
            id="Connection",
        ),
        *(
            pytest.param(make(headers=name + b": a\xff\r\n"), 400, "not ASCII", id=name.decode())
            for name in (
                *(b"Sec-WebSocket-Protocol", b"Sec-WebSocket-Key"),
                *(b"Sec-WebSocket-Extensions", b"Sec-WebSocket-Version"),
            )
        ),
    ],
)
@pytest.mark.parametrize("before", [b"", REQUEST], ids=["first", "after another"])
def test_a_bad_handshake_is_answered_with_the_reason_and_closed(
    server: RunningServer, content: bytes, status: int, words: str, before: bytes
) -> None:
    with open_to(server, before) as connection:
        if before:
            assert read_answer(connection).startswith(b"HTTP/1.1 200")
        connection.sendall(content)
        head, _, body = read_to_the_end(connection).partition(b"\r\n\r\n")
    assert head.split(b" ")[1] == str(status).encode()
    assert b"connection: close" in head
    assert words in json.loads(body)["error"]["message"]


def test_a_handshake_of_usual_size_is_taken(server: RunningServer) -> None:
    """It is refused by the application, which has the route."""
    headers = b"x-long: " + LARGE[:8000] + b"\r\n" + b"x-many: 1\r\n" * 100
    with open_to(server, make(headers=headers)) as connection:
        answer = read_to_the_end(connection)
    assert b"does not transcribe" in answer


def test_a_handshake_behind_an_unanswered_request_ends_the_connection(
    server: RunningServer,
) -> None:
    body = b'{"prompt": "hi"}'
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: " + str(len(body)).encode() + b"\r\n\r\n"
    )
    with open_to(server, head + body + make()) as connection:
        assert b"101" not in read_to_the_end(connection)


def test_a_handshake_on_which_the_server_fails_is_answered_and_forgotten(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept: list[set[Any]] = []

    def fail(self: LimitedWebSocket, _: Any) -> None:
        kept.append(self.connections)
        raise RuntimeError("a bug")

    monkeypatch.setattr(LimitedWebSocket, "handle_connect", fail)
    with open_to(server, make()) as connection:
        assert read_to_the_end(connection).startswith(b"HTTP/1.1 500")
    wait_until(lambda: not kept[0], "the server has forgotten the connection")
    assert "a handshake could not be answered" in caplog.text


def test_half_a_handshake_is_ended_by_the_timer_of_heads() -> None:
    with serve(http=SOON) as running, open_to(running, make()[:-2]) as connection:
        assert read_to_the_end(connection).startswith(b"HTTP/1.1 408")


def test_bad_handshakes_keep_no_connection(
    server: RunningServer, count_files: Callable[[], int]
) -> None:
    before = count_files()
    kinds = [
        make(b"POST /v1/realtime"),
        make(headers=b"Content-Length: 5\r\n"),
        make(headers=b"x-a: 1\r\n" * 200),
        make(b"GET /v1/realtime?model=" + LARGE),
    ]
    held = [open_to(server, content) for content in kinds * 10]
    try:
        # The clients keep theirs open. None of the server's is left.
        wait_until(lambda: count_files() <= before + len(held), "the server's connections end")
    finally:
        for connection in held:
            connection.close()
