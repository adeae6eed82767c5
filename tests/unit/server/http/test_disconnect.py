"""A client that leaves ends its request, whatever it is doing."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from tests.support.waiting import wait_until
from tests.unit.server.standing_in import RunningServer, ScriptedEngine, serve

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": ["a", "b"]},
}
REST = "HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


async def _wait_for_ever(_: Any) -> None:
    await asyncio.Event().wait()


def send(running: RunningServer, path: str, *, stream: bool) -> socket.socket:
    body = json.dumps({**BODIES[path], "stream": stream}).encode()
    head = f"POST {path} {REST}content-length: {len(body)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", running.port), timeout=60)
    connection.sendall(head.encode() + body)
    return connection


def check_all_is_over(running: RunningServer) -> None:
    engine = running.engine
    wait_until(lambda: engine.num_open == 0, "a request remains")
    wait_until(lambda: running.metrics.load == 0, "a request is still counted")
    assert engine.num_aborted == engine.num_started > 0
    assert running.metrics.finished == []
    assert running.metrics.ends == {"abort": engine.num_started}
    assert running.metrics.refusals == {}
    assert {status for _, _, status in running.metrics.responses} <= {200}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["prepare", "between"])
def test_a_client_that_leaves_aborts_its_request(path: str, stream: bool, phase: str) -> None:
    engine = ScriptedEngine(**{phase: _wait_for_ever})
    num_prompts = len(BODIES[path].get("prompt", "a"))
    with serve(engine) as running:
        with send(running, path, stream=stream) as connection:
            wait_until(lambda: engine.num_open == num_prompts, "the request does not start")
            if stream and phase == "between":
                assert b"200 OK" in connection.recv(65536)
        check_all_is_over(running)


def test_a_client_that_leaves_while_it_sends_starts_nothing() -> None:
    with serve() as running:
        with socket.create_connection(("127.0.0.1", running.port), timeout=60) as connection:
            head = f"POST /v1/completions {REST}content-length: 100\r\n\r\n{{"
            connection.sendall(head.encode())
            wait_until(lambda: running.metrics.load == 1, "the request is not counted")
        wait_until(lambda: running.metrics.load == 0, "the request is still counted")
        assert running.engine.calls == []


def test_many_disconnected_clients_leave_nothing_behind() -> None:
    engine = ScriptedEngine(between=_wait_for_ever)
    with serve(engine) as running:
        connections = [
            send(running, "/v1/chat/completions", stream=bool(index % 2)) for index in range(60)
        ]
        wait_until(lambda: engine.num_open == 60, "the requests do not start")
        for connection in connections:
            connection.close()
        check_all_is_over(running)
        assert running.chat(model="other").status_code == 404  # and it still answers


def test_a_request_that_waits_behind_another_is_no_disconnect() -> None:
    body = b'{"prompt": "a"}'
    head = f"POST /v1/completions {REST}content-length: {len(body)}\r\n"
    keep, close = f"{head}\r\n".encode(), f"{head}connection: close\r\n\r\n".encode()
    with (
        serve() as running,
        socket.create_connection(("127.0.0.1", running.port), timeout=60) as connection,
    ):
        connection.sendall(keep + body + close + body)
        received = b"".join(iter(lambda: connection.recv(65536), b""))
        assert received.count(b"HTTP/1.1 200 OK") == received.count(b'"finish_reason":"stop"') == 2
        assert running.engine.num_aborted == 0
