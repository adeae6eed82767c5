"""Who may open a live session, and who is refused with which error."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from tests.support.talking import (
    Talker,
)
from tests.unit.server.http.realtime.clients import (
    OPENAI,
    begin,
    get_refusal,
    wait_until_empty,
)
from tests.unit.server.standing_in import RunningServer, serve
from tests.unit.server.transcribing import ScriptedTranscriber


def test_a_session_needs_a_key_if_the_server_does(
    make_server: Callable[..., RunningServer],
) -> None:
    server = make_server(api_key=("secret", "other"))
    refusal = get_refusal(server)
    assert refusal.status_code == 401
    assert refusal.json()["error"]["code"] == "invalid_api_key"
    wrong = {"Authorization": "Bearer wrong"}
    assert get_refusal(server, additional_headers=wrong).status_code == 401
    offered = ["realtime", "openai-insecure-api-key.wrong"]
    assert get_refusal(server, subprotocols=offered).status_code == 401
    right = {"Authorization": "Bearer secret"}
    with Talker(server.url, OPENAI, additional_headers=right) as talker:
        assert talker.receive()["type"] == "session.created"
        assert talker.socket.subprotocol is None
    offered = ["realtime", "openai-insecure-api-key.other"]
    with Talker(server.url, OPENAI, subprotocols=offered) as talker:
        assert talker.receive()["type"] == "session.created"
        assert talker.socket.subprotocol == "realtime"
    assert server.metrics.refusals["unauthorized"] == 3


def test_foreign_pages_and_hosts_are_refused(make_server: Callable[..., RunningServer]) -> None:
    server = make_server(allowed_origins=("https://friend.example",))
    refusal = get_refusal(server, origin="https://evil.example")
    assert (refusal.status_code, refusal.json()["error"]["code"]) == (403, "origin_not_allowed")
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(
            b"GET /v1/realtime HTTP/1.1\r\nHost: evil.example\r\nConnection: Upgrade\r\n"
            b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        assert b" 403 " in raw.recv(100)
    for origin in (server.url, "https://friend.example"):
        with Talker(server.url, OPENAI, origin=origin) as talker:
            assert talker.receive()["type"] == "session.created"


def test_sessions_are_limited_and_count_as_requests(
    make_server: Callable[..., RunningServer], transcriber: ScriptedTranscriber
) -> None:
    server = make_server(max_realtime_sessions=2)
    with begin(server), begin(server):
        assert server.metrics.load == 2
        refusal = get_refusal(server)
        assert refusal.status_code == 429
        assert "realtime sessions (limit 2)" in refusal.json()["error"]["message"]
        assert refusal.headers["retry-after"] == "1"
    wait_until_empty(server, transcriber)
    with begin(server):
        pass
    busy = make_server(max_concurrent_requests=1)
    with begin(busy):
        refusal = get_refusal(busy)
        assert "concurrent requests (limit 1)" in refusal.json()["error"]["message"]
        assert busy.chat().status_code == 429


@pytest.mark.parametrize(
    ("query", "status", "param"),
    [
        ("?model=gpt-realtime", 404, "model"),
        ("?intent=conversation", 400, "intent"),
        ("?dialect=klingon", 400, "dialect"),
    ],
)
def test_a_wrong_address_is_refused_with_a_reason(
    server: RunningServer, query: str, status: int, param: str
) -> None:
    refusal = get_refusal(server, query)
    assert (refusal.status_code, refusal.json()["error"]["param"]) == (status, param)
    assert refusal.headers["x-request-id"]


def test_a_model_that_does_not_transcribe_has_no_sessions() -> None:
    with serve() as running:
        refusal = get_refusal(running)
        assert refusal.status_code == 400
        assert "does not transcribe" in refusal.json()["error"]["message"]


def test_the_route_says_that_it_is_a_websocket(server: RunningServer) -> None:
    answer = server.get("/v1/realtime")
    assert (answer.status_code, answer.json()["error"]["code"]) == (426, "upgrade_required")
    assert answer.headers["upgrade"] == "websocket"
    operation = server.get("/openapi.json").json()["paths"]["/v1/realtime"]["get"]
    assert set(operation["responses"]) == {"101", "400", "401", "403", "404", "426", "429", "503"}
    assert [each["name"] for each in operation["parameters"]] == ["intent", "model", "dialect"]
