"""What Ray's proxy does as a server does: its connections, and the ids of requests."""

from __future__ import annotations

import asyncio
import importlib
from typing import Any

import pytest
import uvicorn
from starlette.types import Message, Receive, Scope, Send
from uvicorn.config import HTTP_PROTOCOLS, WS_PROTOCOLS

from sensorium.scale.proxy import PATH, ProxyHttpProtocol, ProxyWebSocket, RequestIds, protect
from tests.unit.server.http.wire.clockwork import Line


def test_the_proxy_of_ray_uses_our_connection_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray makes the configuration of uvicorn like this, after it has called the function."""
    monkeypatch.setitem(HTTP_PROTOCOLS, "auto", HTTP_PROTOCOLS["auto"])
    monkeypatch.setitem(WS_PROTOCOLS, "auto", WS_PROTOCOLS["auto"])
    monkeypatch.setattr(ProxyHttpProtocol, "max_connections", None)
    module, _, name = PATH.rpartition(".")
    assert getattr(importlib.import_module(module), name) is protect
    assert [each.cls for each in protect()] == [RequestIds]
    config = uvicorn.Config(lambda: lambda: None, factory=True, log_config=None)
    config.load()
    assert config.http_protocol_class is ProxyHttpProtocol
    assert config.ws_protocol_class is ProxyWebSocket
    assert ProxyHttpProtocol.max_connections is not None


def test_messages_are_not_compressed() -> None:
    assert Line(ProxyWebSocket).protocol.conn.available_extensions == []


@pytest.mark.parametrize(("size", "most"), [(1, 2000), (2**20, 32)])
def test_a_proxy_takes_messages_at_the_speed_that_a_client_may_have(
    monkeypatch: pytest.MonkeyPatch, size: int, most: int
) -> None:
    protocol = Line(ProxyWebSocket).protocol
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        if seconds:  # else it only gives others their turn
            slept.append(seconds)

    async def take() -> None:
        for _ in range(most + 10):
            protocol.queue.put_nowait({"type": "websocket.receive", "text": "a" * size})
            await protocol.receive()

    monkeypatch.setattr(asyncio, "sleep", sleep)
    asyncio.run(take())
    assert len(slept) == 10
    assert slept == sorted(slept)


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [
        pytest.param([b"mine-1"], True, id="sane"),
        pytest.param([b"a" * 200], False, id="long"),
        pytest.param([b"\xff\xfe"], False, id="no UTF-8"),
        pytest.param([b"a\tb"], False, id="not printable"),
        pytest.param([], False, id="none"),
        pytest.param([b"mine-1", b"\xff"], True, id="two"),
    ],
)
@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_ids_of_requests_are_checked_as_by_a_server(
    kind: str, given: list[bytes], is_kept: bool
) -> None:
    seen: list[list[bytes]] = []

    async def app(scope: Scope, _receive: Receive, _send: Send) -> None:
        seen.append([value for name, value in scope["headers"] if name == b"x-request-id"])

    async def receive() -> Message:
        raise AssertionError

    async def send(_: Any) -> None:
        raise AssertionError

    scope = {"type": kind, "headers": [(b"x-request-id", each) for each in given]}
    asyncio.run(RequestIds(app)(scope, receive, send))
    ((request_id,),) = seen
    assert (request_id == b"mine-1") is is_kept
    assert 0 < len(request_id) <= 128
    assert request_id.isascii()
