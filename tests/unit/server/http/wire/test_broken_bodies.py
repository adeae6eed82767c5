"""A body that the parser can't read is answered with 400, unless its request has its answer."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

import pytest

from sensorium.server.http.wire.http_protocol import make_http_protocol
from tests.support.waiting import wait_until
from tests.unit.server.http.wire.clockwork import open_http
from tests.unit.server.standing_in import ScriptedEngine, read_answer, serve

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = b'{"prompt": "a"}'
WHOLE = b"%sContent-Length: %d\r\n\r\n%s" % (HEAD, len(BODY), BODY)
PATIENT = make_http_protocol(head_timeout_s=3600.0, max_connections=None, stream_timeout_s=0.0)
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
BROKEN = {
    "gzip": HEAD + b"Transfer-Encoding: gzip\r\n\r\nf\r\n" + BODY + b"\r\n0\r\n\r\n",
    "xchunked": HEAD + b"Transfer-Encoding: xchunked\r\n\r\nf\r\n" + BODY + b"\r\n0\r\n\r\n",
    "no size": CHUNKED + b"zz\r\n",
    "huge size": CHUNKED + b"ffffffffffffffffff\r\n",
    "0x": CHUNKED + b"0xf\r\n",
    "line feeds": CHUNKED + b"f\n" + BODY + b"\n0\n\n",
    "second chunk": CHUNKED + b"f\r\n" + BODY + b"\r\nzz\r\n",
}


def exchange(port: int, content: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(content)
        return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_body_is_answered_once(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    engine = ScriptedEngine()
    with serve(engine, http=PATIENT) as running:
        answer = exchange(running.port, BROKEN[kind])
    assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert answer.count(b"HTTP/1.1") == 1
    assert b'"code":"invalid_http"' in answer
    assert engine.num_started == 0
    assert not caplog.records


def test_a_broken_body_is_answered_after_requests_that_have_their_answers() -> None:
    with serve(http=PATIENT) as running:
        with socket.create_connection(("127.0.0.1", running.port), timeout=10) as connection:
            connection.sendall(WHOLE)
            assert b"200 OK" in read_answer(connection)
            connection.sendall(BROKEN["no size"])
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")


@pytest.mark.parametrize("kind", BROKEN)
def test_the_error_of_a_broken_body_is_not_the_answer_of_an_earlier_request(kind: str) -> None:
    async def wait(_: Any) -> None:
        await asyncio.sleep(3600.0)

    engine = ScriptedEngine(prepare=wait)
    with (
        serve(engine, http=PATIENT) as running,
        socket.create_connection(("127.0.0.1", running.port), timeout=10) as connection,
    ):
        connection.sendall(WHOLE)
        wait_until(lambda: engine.num_open == 1, "the first request runs")
        connection.sendall(BROKEN[kind])
        assert connection.recv(65536) == b""
        wait_until(lambda: engine.num_aborted == 1, "the first request ends")


@pytest.mark.parametrize("is_complete", [False, True], ids=["begun", "complete"])
def test_a_request_with_an_answer_has_no_second_one(is_complete: bool) -> None:
    line = open_http()
    line.protocol.data_received(CHUNKED)
    line.protocol.cycle.response_started = True
    if is_complete:
        line.protocol.cycle.response_complete = True
        line.protocol.cycle.on_response()
    line.protocol.data_received(b"zz\r\n")
    assert line.transport.closed is not None
    assert line.transport.written == b""


def test_trailers_that_are_too_large_are_refused() -> None:
    with serve(http=PATIENT) as running:
        trailers = b"f\r\n" + BODY + b"\r\n0\r\nX-A: " + b"a" * 80_000
        assert exchange(running.port, CHUNKED + trailers).startswith(b"HTTP/1.1 431")
